//! The gate: which declared languages a tokenizer serves too badly, and why.

use serde::Serialize;

use super::LanguageReport;

/// A language must reach this part of the best language's characters a token.
const PART_OF_BEST: f64 = 0.5;
/// A splitter that leaves less than this part of what `rb` leaves whole cuts words to pieces.
const PART_OF_RB: f64 = 0.6;
/// A language with less than this part of its fair share of the vocabulary was trained on too little.
const PART_OF_FAIR: f64 = 0.6;

/// What stands in the way of a language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its words are cut before any merge.
    Splitter,
    /// The tokenizer was trained on too little of it, beside the others.
    Sampling,
    /// The vocabulary is too small for all languages together.
    VocabularySize,
    /// No splitter reaches the floor: it is above the length of the words.
    Floor,
}

impl Cause {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Splitter => "splitter",
            Cause::Sampling => "sampling",
            Cause::VocabularySize => "vocabulary size",
            Cause::Floor => "floor",
        }
    }
}

/// A language below what it must reach.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Refusal {
    /// The language.
    pub language: String,
    /// Characters a token that it gets.
    pub chars_per_token: f64,
    /// Characters a token that it must reach.
    pub needed: f64,
    /// The likeliest cause.
    pub cause: Cause,
    /// All of it in a sentence, with the remedy.
    pub message: String,
}

/// Refusals in the order of the languages.
pub(super) fn refusals(languages: &[LanguageReport]) -> Vec<Refusal> {
    let best = languages.iter().max_by(|a, b| a.chars_per_token.total_cmp(&b.chars_per_token));
    languages.iter().filter_map(|language| refusal(language, best?, languages.len())).collect()
}

fn refusal(language: &LanguageReport, best: &LanguageReport, languages: usize) -> Option<Refusal> {
    let got = language.chars_per_token;
    let half = best.chars_per_token * PART_OF_BEST;
    let (needed, rule) = match language.floor {
        Some(floor) if got < floor => (floor, format!("its floor of {floor:.2}")),
        _ if got < half => (half, format!("half of the {:.2} of {}", best.chars_per_token, best.name)),
        _ => return None,
    };
    let (own, rb) = (language.chars_per_pretoken, language.rb_chars_per_pretoken);
    // A tokenizer without a splitter has no pre-tokens to blame.
    let cut = own > 0.0 && (own < needed || own < PART_OF_RB * rb);
    let fair = 1.0 / languages as f64;
    let share = language.vocab_share;
    let (cause, why) = if cut && own < 0.9 * rb {
        let why = format!(
            "the splitter leaves {own:.2} characters of it whole, `rb` would leave {rb:.2}; train the tokenizer with \
             the splitter rb"
        );
        (Cause::Splitter, why)
    } else if cut {
        let why = format!(
            "its words have {own:.2} characters, so no vocabulary reaches it; lower the floor to what its words allow"
        );
        (Cause::Floor, why)
    } else if languages > 1 && share < PART_OF_FAIR * fair {
        let why = format!(
            "{:.1} % of the used vocabulary is its own, {:.1} % would be its fair share; train the tokenizer on more \
             of it, or raise its weight",
            100.0 * share,
            100.0 * fair
        );
        (Cause::Sampling, why)
    } else {
        let why = format!(
            "it has {:.1} % of the used vocabulary and its words ({own:.2} characters) are left whole, but each takes \
             {:.2} tokens; raise vocab_size",
            100.0 * share,
            language.tally.tokens as f64 / language.tally.pretokens.max(1) as f64
        );
        (Cause::VocabularySize, why)
    };
    let name = &language.name;
    let message =
        format!("{name} has {got:.2} characters a token, below {rule}; cause: {}: {why}", cause.name());
    Some(Refusal { language: name.clone(), chars_per_token: got, needed, cause, message })
}
