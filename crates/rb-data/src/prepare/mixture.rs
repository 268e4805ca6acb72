//! How often each training document goes into the stream, so that languages have their parts.

use serde::{Deserialize, Serialize};

use super::stage::Entry;
use crate::error::{DataError, Result};
use crate::language::Languages;
use crate::split::Side;

/// What weights are parts of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MixtureUnit {
    /// Bytes of text: a script with three bytes a letter gets fewer letters.
    Bytes,
    /// Tokens, those that end documents not counted.
    Tokens,
}

/// What is done where a language has less text than its part asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Short {
    /// Its documents are repeated; no text is left out.
    Repeat,
    /// Documents of the others are left out; no text is repeated.
    Drop,
}

/// Parts of the declared languages in the training stream, in the ratio of their weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mixture {
    /// What the weights are parts of.
    pub unit: MixtureUnit,
    /// How the parts are reached.
    pub short: Short,
}

/// Most times that a text is repeated: far beyond what a model gains from, and still bounded.
const MOST_REPEATS: f64 = 1000.0;

/// Copies of each entry (1 for those that no mixture concerns), and how often each language's text is in the stream.
pub(super) fn copies(
    entries: &[Entry],
    languages: &Languages,
    mixture: Option<&Mixture>,
) -> Result<(Vec<u32>, Vec<f64>)> {
    let mut copies = vec![1; entries.len()];
    let mut repeats = vec![1.0; languages.list().len()];
    let Some(mixture) = mixture else { return Ok((copies, repeats)) };
    let amount = |entry: &Entry| match mixture.unit {
        MixtureUnit::Bytes => u64::from(entry.bytes),
        MixtureUnit::Tokens => u64::from(entry.tokens),
    };
    let train_of = |language: usize| {
        (0..entries.len())
            .filter(move |n| entries[*n].side == Side::Train && usize::from(entries[*n].language) == language)
    };
    let weights = languages.weights();
    let totals: Vec<u64> =
        (0..weights.len()).map(|l| train_of(l).map(|n| amount(&entries[n])).sum()).collect();
    let sizes = || totals.iter().zip(&weights).filter(|(t, _)| **t > 0).map(|(t, w)| *t as f64 / w);
    let size = match mixture.short {
        Short::Repeat => sizes().fold(0.0, f64::max),
        Short::Drop => sizes().fold(f64::INFINITY, f64::min),
    };
    for (language, (total, weight)) in totals.iter().zip(&weights).enumerate() {
        if *total == 0 {
            continue;
        }
        let ratio = size * weight / *total as f64;
        if ratio > MOST_REPEATS || ratio.is_nan() {
            let name = &languages.list()[language].name;
            return Err(DataError::BadSetting {
                what: "mixture",
                name: "weight",
                got: format!("such that {name} would be repeated {ratio:.0} times"),
                expected: "at most 1000 times; lower its weight, add text of it, or drop text of the others",
            });
        }
        repeats[language] = ratio;
        // Every document as often as the ratio is whole; the rest goes to those with the smallest keys, until the
        // amount is reached to within one document.
        let mut of_language: Vec<usize> = train_of(language).collect();
        of_language.iter().for_each(|n| copies[*n] = ratio.floor() as u32);
        of_language.sort_by_key(|n| (entries[*n].key, *n));
        let wanted = (ratio.fract() * *total as f64).round() as u64;
        let mut given = 0;
        for n in of_language {
            let more = amount(&entries[n]);
            if given + more / 2 >= wanted {
                break;
            }
            copies[n] += 1;
            given += more;
        }
    }
    Ok((copies, repeats))
}
