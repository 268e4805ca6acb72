//! The page about a tokenizer: what each language gets, with bars.

use std::path::Path;

use plotters::style::RGBColor;
use rb_data::fertility::{FertilityReport, LONGEST, LanguageReport};

use super::bars::Bars;
use super::report::Page;
use super::{ObserveError, human};

/// Colours of languages, in turn.
const COLORS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x6f, 0xb4),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x1b, 0x7f, 0x5c),
    RGBColor(0x6a, 0x51, 0xa3),
    RGBColor(0x2a, 0x86, 0x8c),
    RGBColor(0x8a, 0x94, 0xa3),
];
/// Languages in the plot of lengths: more lines of bars could not be told apart.
const MAX_LENGTHS: usize = 6;

/// What the page says.
#[derive(Debug, Clone, Copy)]
pub struct TokenizerPage<'a> {
    /// Its heading.
    pub title: &'a str,
    /// The numbers.
    pub report: &'a FertilityReport,
}

impl TokenizerPage<'_> {
    /// Writes the page to `path`.
    ///
    /// # Errors
    /// [`ObserveError::Plot`] and [`ObserveError::Io`]; an older page then stays as it was.
    pub fn write(&self, path: &Path) -> Result<(), ObserveError> {
        Ok(rb_data::atomic::write(path, self.page()?.as_bytes())?)
    }

    /// The page as text.
    ///
    /// # Errors
    /// [`ObserveError::Plot`].
    pub fn page(&self) -> Result<String, ObserveError> {
        let report = self.report;
        let mut page = Page::begin(self.title, "RustingBrain tokenizer report");
        let verdict = if report.refusals.is_empty() { "accepted" } else { "refused" };
        page.card_list(&[
            ("Vocabulary", human::grouped(report.vocab_size as u64), report.model.clone()),
            ("Splitter", report.splitter.clone(), String::new()),
            ("Fertility", verdict.into(), format!("{} languages", report.languages.len())),
            (
                "Round trip",
                if report.round_trip { "exact".into() } else { "not exact".into() },
                format!("{} documents differ", report.round_trip_failures),
            ),
        ]);
        page.raw("<section class=\"charts\">\n");
        self.charts(&mut page)?;
        page.raw("</section>\n");
        for refusal in &report.refusals {
            page.raw("<section><h2>Refused</h2><p dir=\"auto\">");
            page.text(&refusal.message);
            page.raw("</p></section>\n");
        }
        self.table(&mut page);
        Ok(page.end())
    }

    fn charts(&self, page: &mut Page) -> Result<(), ObserveError> {
        let languages = &self.report.languages;
        let labels: Vec<String> = languages.iter().map(|l| l.name.clone()).collect();
        let of = |value: fn(&LanguageReport) -> f64| languages.iter().map(value).collect::<Vec<f64>>();
        let rates = [
            (COLORS[0], of(|l| l.chars_per_token)),
            (COLORS[1], of(|l| l.chars_per_pretoken)),
            (COLORS[5], of(|l| l.rb_chars_per_pretoken)),
        ];
        let floors: Vec<Option<f64>> = languages.iter().map(|l| l.floor).collect();
        let large = Bars {
            name: "Characters a token",
            labels: &labels,
            series: &rates,
            marks: &floors,
            size: (2200, 800),
        };
        let keys = ["a token", "a pre-token", "a pre-token of the splitter rb"];
        let keys: Vec<(String, RGBColor)> =
            keys.iter().zip(&rates).map(|(key, (color, _))| ((*key).to_owned(), *color)).collect();
        figure(page, &large, "characters; floors in red", &keys)?;

        let shares = [(COLORS[2], of(|l| 100.0 * l.vocab_share))];
        let size = (1080, 560);
        let share =
            Bars { name: "Share of the used vocabulary", labels: &labels, series: &shares, marks: &[], size };
        figure(page, &share, "percent", &[])?;
        let words = [(COLORS[3], of(|l| l.tokens_per_word))];
        let word = Bars { name: "Tokens a word", labels: &labels, series: &words, marks: &[], size };
        figure(page, &word, "", &[])?;

        let scripts: Vec<&(String, u64)> = self.report.scripts.iter().take(12).collect();
        let names: Vec<String> = scripts.iter().map(|(name, _)| name.clone()).collect();
        let entries = [(COLORS[4], scripts.iter().map(|(_, entries)| *entries as f64).collect())];
        let script = Bars { name: "Entries by script", labels: &names, series: &entries, marks: &[], size };
        figure(page, &script, "entries of the vocabulary", &[])?;

        let lengths: Vec<String> =
            (1..=LONGEST).map(|n| if n == LONGEST { format!("{n}+") } else { n.to_string() }).collect();
        let shown = &languages[..languages.len().min(MAX_LENGTHS)];
        let parts: Vec<(RGBColor, Vec<f64>)> = shown
            .iter()
            .zip(COLORS)
            .map(|(l, color)| {
                let all = l.tally.pretokens.max(1) as f64;
                (color, l.tally.pretoken_lengths.iter().map(|n| 100.0 * *n as f64 / all).collect())
            })
            .collect();
        let keys: Vec<(String, RGBColor)> =
            shown.iter().zip(COLORS).map(|(l, color)| (l.name.clone(), color)).collect();
        let length =
            Bars { name: "Length of pre-tokens", labels: &lengths, series: &parts, marks: &[], size };
        figure(page, &length, "characters; percent of pre-tokens", &keys)
    }

    fn table(&self, page: &mut Page) {
        page.raw("<section><h2>Languages</h2><div class=\"scroll\"><table class=\"summary\"><tr>");
        for head in [
            "language",
            "documents",
            "characters",
            "characters a token",
            "bytes a token",
            "words a token",
            "characters a pre-token",
            "own vocabulary",
            "floor",
        ] {
            page.raw("<th scope=\"col\">");
            page.text(head);
            page.raw("</th>");
        }
        page.raw("</tr>\n");
        for l in &self.report.languages {
            page.raw("<tr>");
            for cell in [
                l.name.clone(),
                format!("{}{}", human::grouped(l.tally.documents), if l.held_out { " held out" } else { "" }),
                human::grouped(l.tally.chars),
                format!("{:.2}", l.chars_per_token),
                format!("{:.2}", l.bytes_per_token),
                format!("{:.2}", l.words_per_token),
                format!("{:.2}", l.chars_per_pretoken),
                format!("{:.1} %", 100.0 * l.vocab_share),
                l.floor.map_or(String::new(), |floor| format!("{floor:.2}")),
            ] {
                page.raw("<td dir=\"auto\">");
                page.text(&cell);
                page.raw("</td>");
            }
            page.raw("</tr>\n");
        }
        page.raw("</table></div></section>\n");
    }
}

fn figure(page: &mut Page, bars: &Bars, unit: &str, keys: &[(String, RGBColor)]) -> Result<(), ObserveError> {
    let Some(svg) = bars.draw()? else { return Ok(()) };
    page.raw("<figure><figcaption><b>");
    page.text(bars.name);
    page.raw("</b> <span>");
    page.text(unit);
    page.raw("</span>");
    for (key, color) in keys {
        page.legend(key, "", *color);
    }
    page.raw("</figcaption>\n");
    page.raw(&svg);
    page.raw("</figure>\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use rb_data::fertility::{FertilityOptions, measure};
    use rb_data::{Document, Languages, Tokenizer, TokenizerConfig};

    use super::*;

    #[test]
    fn page_has_its_plots_and_says_why_it_refused() {
        let config = TokenizerConfig { vocab_size: 257, ..TokenizerConfig::default() };
        let tokenizer = Tokenizer::train(["x"].iter().map(Ok), &config).unwrap().0;
        let document = |text: &str| {
            Ok(Document { text: text.into(), file: Path::new("a").into(), line: 1, fields: Vec::new() })
        };
        let texts = ["the cat sat", "\u{9AC}\u{9BE}\u{982}\u{9B2}\u{9BE}"];
        let list = ["<en>,script=Latin", "bn,script=Bengali,floor=2"];
        let languages = Languages::new(list.iter().map(|l| l.parse().unwrap()).collect()).unwrap();
        let report =
            measure(texts.iter().map(|t| document(t)), &tokenizer, &languages, FertilityOptions::default());
        let page = TokenizerPage { title: "t", report: &report.unwrap() }.page().unwrap();
        assert_eq!(page.matches("<svg").count(), 5);
        assert!(page.contains("bn has 0.33 characters a token, below its floor of 2.00"), "{page}");
        assert!(page.contains("&lt;en&gt;") && !page.contains("<en>"), "names are escaped");
        assert!(page.trim_end().ends_with("</html>"));
    }
}
