//! `report.html`: one page about a run, complete in itself.
//!
//! The page has its charts as inline SVG and its style inline; it loads nothing and runs nothing, so it can be
//! mailed, archived and opened anywhere.

use super::chart::{Chart, Drawn, SPARSE_COLOR, Scale};
use super::series::{Point, median};
use super::{EventKind, EventRecord, ObserveError, Record, human, metrics};
use plotters::style::RGBColor;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

const STYLE: &str = include_str!("report.css");

/// Events that are listed at most, the latest ones.
const MAX_EVENTS: usize = 500;
/// Vertical lines that a chart has at most: more would hide the curve.
const MAX_MARKS: usize = 200;

const LOSS_COLOR: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
const RATE_COLOR: RGBColor = RGBColor(0x6a, 0x51, 0xa3);
const NORM_COLOR: RGBColor = RGBColor(0x1b, 0x7f, 0x5c);
const SPEED_COLOR: RGBColor = RGBColor(0x2a, 0x86, 0x8c);
const RESUME_COLOR: RGBColor = RGBColor(0x8a, 0x94, 0xa3);
const SKIP_COLOR: RGBColor = RGBColor(0xc6, 0x28, 0x28);

/// What the page says beside the records of the run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Report<'a> {
    pub title: &'a str,
    /// The resolved config, shown as it is.
    pub config_text: &'a str,
    /// Rows of the summary table: name, value.
    pub summary: &'a [(String, String)],
    /// Why no figure may be shown, for a run that did not pass its gate.
    pub withheld: Option<&'a str>,
    /// Generated text: a heading such as the prompt, and the text, in any script.
    pub samples: &'a [(String, String)],
}

/// Writes `<run_dir>/report.html` from `<run_dir>/metrics.jsonl` and returns its path.
///
/// # Errors
/// As [`Report::write`].
pub fn write_report(
    run_dir: &Path,
    title: &str,
    config_text: &str,
    summary: &[(String, String)],
) -> Result<PathBuf, ObserveError> {
    Report { title, config_text, summary, withheld: None, samples: &[] }.write(run_dir)
}

impl Report<'_> {
    /// Writes `<run_dir>/report.html` from `<run_dir>/metrics.jsonl` and returns its path.
    ///
    /// # Errors
    /// Those of [`metrics::read`](super::read) and [`ObserveError::Io`]; an older report then stays as it was.
    pub fn write(&self, run_dir: &Path) -> Result<PathBuf, ObserveError> {
        let records = metrics::read(&run_dir.join("metrics.jsonl"))?;
        let page = self.page(&records)?;
        let path = run_dir.join("report.html");
        rb_data::atomic::write(&path, page.as_bytes())?;
        Ok(path)
    }

    /// Returns the page as text.
    ///
    /// # Errors
    /// [`ObserveError::Plot`].
    pub fn page(&self, records: &[Record]) -> Result<String, ObserveError> {
        let run = Run::new(records);
        let mut page = Page::begin(self.title, "RustingBrain training report");
        match self.withheld {
            None => {
                page.cards(&run);
                page.charts(&run)?;
            }
            Some(reason) => {
                page.raw("<p class=\"empty\">No figure of this run is shown: ");
                page.text(reason);
                page.raw("</p>\n");
            }
        }
        page.summary(self.summary);
        page.samples(self.samples);
        page.events(&run.events);
        if !self.config_text.is_empty() {
            page.raw("<section><h2>Config</h2><pre class=\"config\">");
            page.text(self.config_text);
            page.raw("</pre></section>\n");
        }
        Ok(page.end())
    }
}

/// The records of a run, sorted by what they are shown as.
#[derive(Default)]
struct Run<'a> {
    loss: Vec<Point>,
    lr: Vec<Point>,
    grad_norm: Vec<Point>,
    tokens_per_s: Vec<Point>,
    flops_per_s: Vec<Point>,
    eval_loss: Vec<Point>,
    events: Vec<&'a EventRecord>,
    tokens: u64,
}

impl<'a> Run<'a> {
    fn new(records: &'a [Record]) -> Self {
        let mut run = Self::default();
        for record in records {
            let step = record.step() as f64;
            match record {
                Record::Train(train) => {
                    run.loss.push((step, train.loss.get()));
                    run.lr.push((step, train.lr.get()));
                    run.grad_norm.push((step, train.grad_norm.get()));
                    run.tokens_per_s.extend(train.tokens_per_s.map(|speed| (step, speed.get())));
                    run.flops_per_s.extend(train.flops_per_s.map(|speed| (step, speed.get())));
                    run.tokens = run.tokens.max(train.tokens);
                }
                Record::Eval(eval) => run.eval_loss.push((step, eval.loss.get())),
                Record::Event(event) => run.events.push(event),
            }
        }
        run
    }

    fn count(&self, kind: EventKind) -> usize {
        self.events.iter().filter(|e| e.event == kind).count()
    }

    /// Vertical lines at the latest resumes and skipped steps.
    fn marks(&self) -> Vec<(f64, RGBColor)> {
        let color = |event: &EventRecord| match event.event {
            EventKind::Resume => Some((event.step as f64, RESUME_COLOR)),
            EventKind::SkippedStep => Some((event.step as f64, SKIP_COLOR)),
            _ => None,
        };
        self.events.iter().rev().filter_map(|e| color(e)).take(MAX_MARKS).collect()
    }
}

/// A page that is being written, complete in itself.
pub(super) struct Page(String);

impl Page {
    /// A page with its head and heading.
    pub(super) fn begin(title: &str, subtitle: &str) -> Page {
        let mut page = Page(String::with_capacity(1 << 18));
        page.raw("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
        page.raw("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
        page.raw(
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
             style-src 'unsafe-inline'\">\n<title>",
        );
        page.text(title);
        page.raw("</title>\n<style>\n");
        page.raw(STYLE);
        page.raw("</style>\n</head>\n<body>\n<main>\n<header><h1 dir=\"auto\">");
        page.text(title);
        page.raw("</h1><p>");
        page.text(subtitle);
        page.raw("</p></header>\n");
        page
    }

    /// The whole page.
    pub(super) fn end(mut self) -> String {
        self.raw("</main>\n</body>\n</html>\n");
        self.0
    }

    /// Appends markup.
    pub(super) fn raw(&mut self, html: &str) {
        self.0.push_str(html);
    }

    /// Appends text from outside, with no character of it taken for markup.
    pub(super) fn text(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                '\n' | '\t' => self.0.push(c),
                '\r' => {}
                // HTML allows no other control character; show that there was one.
                c if c.is_control() => self.0.push(char::REPLACEMENT_CHARACTER),
                c => self.0.push(c),
            }
        }
    }

    fn cards(&mut self, run: &Run) {
        let mut cards: Vec<(&str, String, String)> = Vec::new();
        if let Some(&(step, loss)) = run.loss.last() {
            cards.push(("Steps", human::grouped(step as u64), String::new()));
            cards.push(("Tokens", human::tokens(run.tokens), String::new()));
            cards.push(("Last training loss", human::loss(loss), String::new()));
        }
        if let Some(&(step, loss)) = run.eval_loss.iter().min_by(|a, b| a.1.total_cmp(&b.1)) {
            cards.push((
                "Best eval loss",
                human::loss(loss),
                format!("at step {}", human::grouped(step as u64)),
            ));
        }
        if let Some(speed) = median(run.tokens_per_s.iter().map(|p| p.1)) {
            cards.push(("Tokens/s, median", human::si(speed), String::new()));
        }
        let skipped = run.count(EventKind::SkippedStep);
        if skipped > 0 {
            cards.push(("Skipped steps", human::grouped(skipped as u64), "not in the curves".to_owned()));
        }
        self.card_list(&cards);
    }

    /// Appends cards: name, value and a note that may be empty.
    pub(super) fn card_list(&mut self, cards: &[(&str, String, String)]) {
        if cards.is_empty() {
            return;
        }
        self.raw("<dl class=\"cards\">\n");
        for (name, value, note) in cards {
            self.raw("<div><dt>");
            self.text(name);
            self.raw("</dt><dd>");
            self.text(value);
            if !note.is_empty() {
                self.raw("<small>");
                self.text(note);
                self.raw("</small>");
            }
            self.raw("</dd></div>\n");
        }
        self.raw("</dl>\n");
    }

    fn charts(&mut self, run: &Run) -> Result<(), ObserveError> {
        let marks = run.marks();
        let small = Chart {
            name: "",
            points: &[],
            smoothed: true,
            sparse: &[],
            marks: &[],
            scale: Scale::FromZero,
            color: LOSS_COLOR,
            size: (1080, 560),
        };
        let loss = Chart {
            name: "Loss",
            points: &run.loss,
            sparse: &run.eval_loss,
            marks: &marks,
            scale: Scale::Fit,
            size: (2200, 800),
            ..small.clone()
        };
        let rate = Chart {
            name: "Learning rate",
            points: &run.lr,
            smoothed: false,
            color: RATE_COLOR,
            ..small.clone()
        };
        let norm =
            Chart { name: "Gradient norm", points: &run.grad_norm, color: NORM_COLOR, ..small.clone() };
        let speed = Chart {
            name: "Tokens per second",
            points: &run.tokens_per_s,
            color: SPEED_COLOR,
            ..small.clone()
        };
        let flops =
            Chart { name: "Model FLOP/s", points: &run.flops_per_s, color: SPEED_COLOR, ..small.clone() };

        self.raw("<section class=\"charts\">\n");
        let Some(drawn) = loss.draw()? else {
            self.raw("<p class=\"empty\">No step has been recorded yet.</p>\n</section>\n");
            return Ok(());
        };
        self.figure(&loss, "nats per token", &drawn, &run.events);
        let rest = [(rate, ""), (norm, "before clipping"), (speed, ""), (flops, "without recomputation")];
        for (chart, unit) in &rest {
            if let Some(drawn) = chart.draw()? {
                self.figure(chart, unit, &drawn, &[]);
            }
        }
        self.raw("</section>\n");
        Ok(())
    }

    fn figure(&mut self, chart: &Chart, unit: &str, drawn: &Drawn, events: &[&EventRecord]) {
        self.raw("<figure><figcaption><b>");
        self.text(chart.name);
        self.raw("</b> <span>");
        let unit = [unit, if drawn.log { "log scale" } else { "" }].into_iter().filter(|s| !s.is_empty());
        self.text(&unit.collect::<Vec<_>>().join(", "));
        self.raw("</span>");
        let has = |kind| events.iter().any(|e| e.event == kind);
        if drawn.smoothed {
            self.legend("each record", "light", chart.color);
            self.legend("median", "", chart.color);
        } else if !chart.sparse.is_empty() && !chart.points.is_empty() {
            self.legend("train", "", chart.color);
        }
        if !chart.sparse.is_empty() {
            self.legend("eval", "", SPARSE_COLOR);
        }
        if has(EventKind::Resume) {
            self.legend("resumed", "mark", RESUME_COLOR);
        }
        if has(EventKind::SkippedStep) {
            self.legend("skipped step", "mark", SKIP_COLOR);
        }
        self.raw("</figcaption>\n");
        self.raw(&drawn.svg);
        self.raw("</figure>\n");
    }

    /// Appends an entry of a legend.
    pub(super) fn legend(&mut self, name: &str, class: &str, RGBColor(r, g, b): RGBColor) {
        let key = format!("<em><i class=\"{class}\" style=\"background:#{r:02x}{g:02x}{b:02x}\"></i>");
        self.raw(&key);
        self.text(name);
        self.raw("</em>");
    }

    fn summary(&mut self, rows: &[(String, String)]) {
        if rows.is_empty() {
            return;
        }
        self.raw("<section><h2>Summary</h2><table class=\"summary\">\n");
        for (name, value) in rows {
            self.raw("<tr><th scope=\"row\" dir=\"auto\">");
            self.text(name);
            self.raw("</th><td dir=\"auto\">");
            self.text(value);
            self.raw("</td></tr>\n");
        }
        self.raw("</table></section>\n");
    }

    fn samples(&mut self, samples: &[(String, String)]) {
        if samples.is_empty() {
            return;
        }
        self.raw("<section><h2>Samples</h2>\n");
        for (heading, text) in samples {
            self.raw("<h3 dir=\"auto\">");
            self.text(heading);
            self.raw("</h3><div class=\"sample\" dir=\"auto\">");
            self.text(text);
            self.raw("</div>\n");
        }
        self.raw("</section>\n");
    }

    fn events(&mut self, events: &[&EventRecord]) {
        if events.is_empty() {
            return;
        }
        self.raw("<section><h2>Events</h2>\n");
        let hidden = events.len().saturating_sub(MAX_EVENTS);
        if hidden > 0 {
            let earlier = human::grouped(hidden as u64);
            // Writing to a String cannot fail.
            let _ =
                writeln!(self.0, "<p>{earlier} earlier events are in <code>metrics.jsonl</code> only.</p>");
        }
        self.raw("<div class=\"scroll\"><table class=\"events\">\n<thead><tr><th>Step</th><th>Event</th>");
        self.raw("<th>Message</th></tr></thead>\n<tbody>\n");
        for event in &events[hidden..] {
            let class = event.event.as_str();
            let _ = write!(self.0, "<tr><td>{}</td><td>", human::grouped(event.step));
            let _ =
                write!(self.0, "<b class=\"{class}\">{}</b></td><td dir=\"auto\">", class.replace('_', " "));
            self.text(&event.message);
            self.raw("</td></tr>\n");
        }
        self.raw("</tbody></table></div></section>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TempDir, pass, train};
    use super::super::{EvalRecord, MetricsWriter};
    use super::*;

    fn page(records: &[Record]) -> String {
        Report { title: "run", ..Report::default() }.page(records).unwrap()
    }

    fn assert_self_contained(page: &str) {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        for outside in ["http:", "https:", "<script", "<link", "src=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(page.contains("<meta charset=\"utf-8\">"));
        for tag in ["section", "figure", "svg", "table", "div", "dl", "pre", "main"] {
            let open = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn nothing_one_record_and_no_eval() {
        let empty = page(&[]);
        assert!(empty.contains("No step has been recorded yet"));
        let one = page(&[train(1, 4.0).into()]);
        assert_eq!(one.matches("<svg").count(), 5);
        assert!(one.contains("4.0000") && !one.contains("Best eval loss"));
        let only_eval = page(&[EvalRecord::new(&pass(), 0, 10.5, 9, None).unwrap().into()]);
        assert_eq!(only_eval.matches("<svg").count(), 1);
        for page in [empty, one, only_eval] {
            assert_self_contained(&page);
        }
    }

    #[test]
    fn hundred_thousand_records_make_a_small_page() {
        let records: Vec<Record> =
            (1..=100_000).map(|s| train(s, 3.0 + (s % 9) as f64 * 0.1).into()).collect();
        let page = page(&records);
        assert!(page.len() < 600_000, "{}", page.len());
        assert!(page.contains("<dd>100,000</dd>") && page.contains("median</em>"));
        assert_self_contained(&page);
    }

    #[test]
    fn text_from_outside_is_escaped_and_keeps_its_script() {
        let summary = [("a<b".to_owned(), "<script>alert(1)</script>".to_owned())];
        let samples = [(
            "\u{645}\u{631}\u{62d}\u{628}\u{627}".to_owned(),
            "\u{995}\u{9cd}\u{9b7} & 'x'\u{0}\r\n".to_owned(),
        )];
        let records = [EventRecord::new(3, EventKind::Warning, "\"<b>\"").into()];
        let report = Report {
            title: "<t>",
            config_text: "name = \"</pre>\"\n",
            summary: &summary,
            withheld: None,
            samples: &samples,
        };
        let page = report.page(&records).unwrap();
        assert_self_contained(&page);
        for expected in [
            "<title>&lt;t&gt;</title>",
            "name = &quot;&lt;/pre&gt;&quot;\n</pre>",
            "&lt;script&gt;alert(1)&lt;/script&gt;",
            "\u{995}\u{9cd}\u{9b7} &amp; &#39;x&#39;\u{fffd}\n</div>",
            "\u{645}\u{631}\u{62d}\u{628}\u{627}</h3>",
            "&quot;&lt;b&gt;&quot;</td>",
        ] {
            assert!(page.contains(expected), "{expected}");
        }
    }

    #[test]
    fn events_are_marked_and_listed() {
        let mut records: Vec<Record> = (1..=30).map(|s| train(s, 3.0).into()).collect();
        records.push(EventRecord::new(10, EventKind::Resume, "from step-10").into());
        records.push(EventRecord::new(12, EventKind::SkippedStep, "loss is NaN").into());
        let html = page(&records);
        assert!(html.contains("skipped step</b>") && html.contains("resumed</em>"));
        assert!(html.contains("<dt>Skipped steps</dt><dd>1<small>"));
        let many: Vec<Record> = (0..700)
            .map(|s| EventRecord::new(s, EventKind::Checkpoint, format!("step-{s}")).into())
            .collect();
        let html = page(&many);
        assert!(
            html.contains("200 earlier events") && html.contains("step-699") && !html.contains("step-199<")
        );
    }

    #[test]
    fn file_is_written_beside_the_metrics() {
        let dir = TempDir::new();
        let missing = write_report(dir.path(), "t", "", &[]).unwrap_err().to_string();
        assert!(missing.contains("metrics.jsonl"), "{missing}");
        let mut writer = MetricsWriter::create(&dir.path().join("metrics.jsonl")).unwrap();
        writer.append(train(1, 4.0)).unwrap();
        let path = write_report(dir.path(), "t", "a = 1", &[]).unwrap();
        assert_eq!(path, dir.path().join("report.html"));
        assert_self_contained(&std::fs::read_to_string(path).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
