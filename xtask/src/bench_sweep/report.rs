//! What a sweep found: a table, all results as JSON, and a picture.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use plotters::prelude::*;
use serde_json::{Value, json};

use super::Shape;
use super::run::Run;
use crate::error::Error;

/// One program on one shape.
pub struct Column {
    pub name: String,
    pub about: Value,
    /// Runs that passed the gate, or why there is no speed.
    pub outcome: Result<Vec<Run>, String>,
}

impl Column {
    fn speeds(&self) -> Option<Vec<f64>> {
        let runs = self.outcome.as_ref().ok().filter(|runs| !runs.is_empty())?;
        Some(runs.iter().map(Run::tokens_per_s).collect())
    }

    fn speed(&self) -> Option<f64> {
        self.speeds().map(median)
    }
}

/// All shapes so far.
pub struct Sweep {
    machine: Value,
    /// On the CPU a sweep tests its programs: a ratio would be taken for a result.
    ratios: bool,
    repeats: u32,
    missing: Vec<String>,
    shapes: Vec<(Shape, Vec<Column>)>,
}

impl Sweep {
    pub fn new(cpu: bool, repeats: u32, missing: Vec<String>) -> Sweep {
        Sweep { machine: machine(cpu), ratios: !cpu, repeats, missing, shapes: Vec::new() }
    }

    pub fn add(&mut self, shape: Shape, columns: Vec<Column>) {
        self.shapes.push((shape, columns));
    }

    /// Writes `table.md`, `results.json` and `speeds.svg`, each whole or not at all.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        for (name, text) in [
            ("table.md", self.table()),
            ("results.json", format!("{:#}\n", self.json())),
            ("speeds.svg", self.picture()?),
        ] {
            let (path, part) = (folder.join(name), folder.join(format!("{name}.part")));
            std::fs::write(&part, text).map_err(Error::io("write", &part))?;
            std::fs::rename(&part, &path).map_err(Error::io("replace", &path))?;
        }
        Ok(())
    }

    /// Markdown. `ratio` is our median over the line's; it is there only where both passed the gate.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{}; {} runs each in turns.\n",
            self.machine["device"].as_str().unwrap_or("an unknown machine"),
            self.repeats
        );
        text += "| shape | program | tokens/s, median (range) | step ms | TFLOP/s | peak MiB | loss, first to last | ratio |\n";
        text += "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
        for ((batch, len), columns) in &self.shapes {
            let ours = columns.first().and_then(Column::speed).filter(|_| self.ratios);
            for column in columns {
                let _ = write!(text, "| {batch}x{len} | {} ", column.name);
                let (runs, speeds) = match (&column.outcome, column.speeds()) {
                    (Ok(runs), Some(speeds)) => (runs, speeds),
                    (Err(reason), _) => {
                        let _ = writeln!(text, "| {} | | | | | |", reason.replace('|', "/"));
                        continue;
                    }
                    _ => {
                        text += "| no run | | | | | |\n";
                        continue;
                    }
                };
                let low = speeds.iter().copied().fold(f64::INFINITY, f64::min);
                let high = speeds.iter().copied().fold(0.0, f64::max);
                let speed = median(speeds);
                let of = |f: fn(&Run) -> f64| median(runs.iter().map(f).collect());
                let peak = runs
                    .iter()
                    .filter_map(Run::peak_mib)
                    .fold(None, |m: Option<f64>, x| Some(m.map_or(x, |m| m.max(x))));
                let (first, last) = runs[0].losses();
                let ratio = ours.map_or("-".into(), |ours| format!("{:.2}", ours / speed));
                let _ = writeln!(
                    text,
                    "| {speed:.0} ({low:.0} to {high:.0}) | {:.2} | {:.1} | {} | {first:.3} to {last:.3} | {ratio} |",
                    of(Run::step_ms),
                    of(Run::tflops),
                    peak.map_or("-".into(), |mib| format!("{mib:.0}"))
                );
            }
        }
        for line in &self.missing {
            let _ = writeln!(text, "\nNot run: {line}.");
        }
        text
    }

    fn json(&self) -> Value {
        let shapes: Vec<Value> = self
            .shapes
            .iter()
            .map(|((batch, len), columns)| {
                let ours = columns.first().and_then(Column::speed).filter(|_| self.ratios);
                let programs: Vec<Value> = columns
                    .iter()
                    .map(|column| {
                        let runs: Vec<&Value> = column.outcome.iter().flatten().map(Run::whole).collect();
                        json!({
                            "program": column.name,
                            "about": column.about,
                            "refused_or_failed": column.outcome.as_ref().err(),
                            "tokens_per_s": column.speed(),
                            "ratio": ours.zip(column.speed()).map(|(ours, speed)| ours / speed),
                            "runs": runs,
                        })
                    })
                    .collect();
                json!({ "batch_size": batch, "seq_len": len, "programs": programs })
            })
            .collect();
        json!({
            "machine": self.machine,
            "command": std::env::args().collect::<Vec<_>>(),
            "repeats": self.repeats,
            "not_installed": self.missing,
            "shapes": shapes,
        })
    }

    /// Bars of every program on every shape.
    fn picture(&self) -> Result<String, Error> {
        let bars: Vec<(usize, usize, f64)> = self
            .shapes
            .iter()
            .enumerate()
            .flat_map(|(i, (_, columns))| {
                columns.iter().enumerate().filter_map(move |(j, column)| Some((i, j, column.speed()?)))
            })
            .collect();
        let most = bars.iter().map(|bar| bar.2).fold(1.0, f64::max) * 1.05;
        let count = self.shapes.len().max(1);
        let mut svg = String::new();
        self.draw(&bars, most, count, &mut svg)
            .map_err(|detail| Error::Program { program: "plotters".into(), detail })?;
        Ok(svg)
    }

    fn draw(
        &self,
        bars: &[(usize, usize, f64)],
        most: f64,
        count: usize,
        svg: &mut String,
    ) -> Result<(), String> {
        const COLORS: [RGBColor; 5] = [
            RGBColor(0x1f, 0x6f, 0xb4),
            RGBColor(0xd9, 0x5f, 0x02),
            RGBColor(0x1b, 0x9e, 0x77),
            RGBColor(0x75, 0x70, 0xb3),
            RGBColor(0x66, 0x66, 0x66),
        ];
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let area = SVGBackend::with_string(svg, (960, 420)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| text(&e))?;
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .caption("training speed, tokens/s", ("sans-serif", 18))
            .x_label_area_size(32)
            .y_label_area_size(72)
            .build_cartesian_2d(0.0..count as f64, 0.0..most)
            .map_err(|e| text(&e))?;
        let names: Vec<String> = self.shapes.iter().map(|((b, t), _)| format!("{b}x{t}")).collect();
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(2 * count + 1)
            .x_label_formatter(&|x| match x.fract() {
                part if (part - 0.5).abs() < 1e-6 => names.get(*x as usize).cloned().unwrap_or_default(),
                _ => String::new(),
            })
            .y_label_formatter(&|y| format!("{:.0}k", y / 1e3))
            .draw()
            .map_err(|e| text(&e))?;
        let programs = self.shapes.iter().map(|(_, columns)| columns.len()).max().unwrap_or(1);
        let width = 0.8 / programs as f64;
        for j in 0..programs {
            let color = COLORS[j % COLORS.len()];
            let mine = bars.iter().filter(|bar| bar.1 == j).map(|&(i, j, speed)| {
                let left = i as f64 + 0.1 + j as f64 * width;
                Rectangle::new([(left, 0.0), (left + 0.92 * width, speed)], color.filled())
            });
            let name = self.shapes.iter().find_map(|(_, columns)| columns.get(j)).map(|c| c.name.clone());
            chart
                .draw_series(mine)
                .map_err(|e| text(&e))?
                .label(name.unwrap_or_default())
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled()));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .draw()
            .map_err(|e| text(&e))?;
        area.present().map_err(|e| text(&e))
    }
}

/// What the figures belong to.
fn machine(cpu: bool) -> Value {
    let said = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).output().ok().filter(|o| o.status.success());
        output.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_string())
    };
    let query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit";
    let card = said("nvidia-smi", &[query, "--format=csv,noheader"]);
    let cpu_info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor =
        cpu_info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|p| p.1);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let device = if cpu {
        format!("{} on the CPU in fp32: no measurement", processor.unwrap_or("unknown processor"))
    } else {
        card.clone().unwrap_or_else(|| "unknown card".into())
    };
    json!({ "device": device, "card": card, "processor": processor, "cores": cores, "system": said("uname", &["-sr"]) })
}

/// The middle value, or the mean of the middle two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => 0.5 * (values[middle - 1] + values[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, outcome: Result<&[f64], &str>) -> Column {
        let run = |&speed: &f64| {
            let json = json!({ "losses": [3.0, 2.0], "tokens_per_s": speed, "step_ms": 2.0, "flops_per_token": 1e9, "peak_mib": 7.0 });
            Run::pass(json).unwrap()
        };
        let outcome = outcome.map(|speeds| speeds.iter().map(run).collect()).map_err(String::from);
        Column { name: name.into(), about: Value::Null, outcome }
    }

    fn sweep(columns: Vec<Column>) -> Sweep {
        let mut sweep = Sweep::new(false, 3, vec!["x: y is not installed".into()]);
        sweep.add((4, 512), columns);
        sweep
    }

    #[test]
    fn ratios_are_of_medians() {
        let ours = column("RustingBrain", Ok(&[900.0, 1000.0, 1100.0]));
        let table = sweep(vec![ours, column("torch graph", Ok(&[500.0, 400.0, 900.0]))]).table();
        assert!(
            table.contains(
                "| 4x512 | torch graph | 500 (400 to 900) | 2.00 | 0.5 | 7 | 3.000 to 2.000 | 2.00 |"
            ),
            "{table}"
        );
        assert!(table.contains("Not run: x: y is not installed."), "{table}");
    }

    #[test]
    fn no_ratio_on_the_cpu() {
        let mut sweep = Sweep::new(true, 1, Vec::new());
        sweep.add((1, 2), vec![column("RustingBrain", Ok(&[5.0])), column("torch", Ok(&[5.0]))]);
        let table = sweep.table();
        assert!(
            table.contains("no measurement") && table.matches("3.000 to 2.000 | - |").count() == 2,
            "{table}"
        );
    }

    #[test]
    fn no_ratio_without_both() {
        for (ours, peer) in [(Err("refused: NaN"), Ok(&[5.0][..])), (Ok(&[5.0][..]), Err("failed: gone"))] {
            let found = sweep(vec![column("RustingBrain", ours), column("torch", peer)]);
            let (table, json) = (found.table(), found.json());
            assert!(table.contains("refused: NaN") || table.contains("failed: gone"), "{table}");
            assert!(json["shapes"][0]["programs"][1]["ratio"].is_null(), "{json}");
            let svg = found.picture().unwrap();
            assert!(svg.contains("4x512") && svg.contains("torch"), "{svg}");
        }
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }
}
