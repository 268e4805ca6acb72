//! An axis with round ticks, linear or logarithmic, for `plotters`.

use super::human;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use std::ops::Range;

/// Values beyond this are drawn at the edge: their differences would overflow.
const LIMIT: f64 = 1e100;

/// An axis: what it spans and where its ticks are.
#[derive(Debug, Clone)]
pub struct Axis {
    low: f64,
    high: f64,
    log: bool,
    ticks: Vec<f64>,
    labels: LabelStyle,
}

#[derive(Debug, Clone)]
enum LabelStyle {
    /// Divided by `unit`, with a fixed number of decimals and what the unit is called.
    Scaled { unit: f64, suffix: String, decimals: usize },
    /// Each by its own size.
    Each,
}

impl Axis {
    /// Spans the steps `low..=high`, with whole numbers as ticks.
    pub fn steps(low: f64, high: f64, max_ticks: usize) -> Self {
        let (low, high) = if low < high { (low, high) } else { (low - 1.0, high + 1.0) };
        let step = round_up(high - low, max_ticks).max(1.0);
        Self::linear_with_step(low, high, step)
    }

    /// Spans `low..=high` and a little more.
    pub fn linear(low: f64, high: f64, max_ticks: usize) -> Self {
        let (low, high) = (low.clamp(-LIMIT, LIMIT), high.clamp(-LIMIT, LIMIT));
        let margin = if low < high { (high - low) * 0.05 } else { (low.abs() * 0.1).max(1e-9) };
        let (low, high) = (low - margin, high + margin);
        Self::linear_with_step(low, high, round_up(high - low, max_ticks))
    }

    /// Spans 0 to a little more than `high`.
    pub fn from_zero(high: f64, max_ticks: usize) -> Self {
        let high = if high > 0.0 { high.min(LIMIT) * 1.05 } else { 1.0 };
        Self::linear_with_step(0.0, high, round_up(high, max_ticks))
    }

    /// Spans `low..=high`, both above 0, in powers of ten.
    pub fn log(low: f64, high: f64, max_ticks: usize) -> Self {
        let low = low.clamp(1.0 / LIMIT, LIMIT);
        let high = high.clamp(low, LIMIT);
        let margin = (high / low).powf(0.05).max(1.1);
        let (low, high) = (low / margin, high * margin);
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let within = |v: &f64| (low..=high).contains(v);
        let fine = (first..=last).flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10_f64.powi(e)));
        let mut ticks: Vec<f64> = fine.filter(within).collect();
        if ticks.len() > max_ticks {
            let powers: Vec<f64> = (first..=last).map(|e| 10_f64.powi(e)).filter(within).collect();
            let stride = powers.len().div_ceil(max_ticks.max(1)).max(1);
            ticks = powers.into_iter().step_by(stride).collect();
        }
        Self { low, high, log: true, ticks, labels: LabelStyle::Each }
    }

    fn linear_with_step(low: f64, high: f64, step: f64) -> Self {
        let (first, last) = ((low / step).ceil(), (high / step).floor());
        let count = (last - first).clamp(0.0, 100.0) as usize;
        let ticks: Vec<f64> = (0..=count).map(|i| (first + i as f64) * step).collect();
        let labels = LabelStyle::for_ticks(low.abs().max(high.abs()), step);
        Self { low, high, log: false, ticks, labels }
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that cuts `span` into at most `max_ticks` parts.
fn round_up(span: f64, max_ticks: usize) -> f64 {
    let raw = span / max_ticks.max(1) as f64;
    let power = 10_f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= raw * 0.999).unwrap_or(10.0 * power)
}

impl LabelStyle {
    fn for_ticks(largest: f64, step: f64) -> Self {
        const PREFIXES: [(f64, &str); 6] =
            [(1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
        let (unit, suffix) = if (1e-3..1e21).contains(&largest) {
            let prefix = PREFIXES.into_iter().find(|(unit, _)| largest >= 10.0 * unit);
            prefix.map_or((1.0, String::new()), |(unit, prefix)| (unit, prefix.to_owned()))
        } else {
            let exponent = largest.log10().floor() as i32;
            (10_f64.powi(exponent), format!("e{exponent}"))
        };
        // A step of 0.02 needs two decimals; the small term keeps 0.001 from being taken for 0.0009999.
        let decimals = (-(step / unit).log10() - 1e-9).ceil().clamp(0.0, 9.0) as usize;
        Self::Scaled { unit, suffix, decimals }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let place = if self.log {
            (value.max(f64::MIN_POSITIVE) / self.low).log10() / (self.high / self.low).log10()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        let length = f64::from(limit.1 - limit.0);
        limit.0 + (place.clamp(0.0, 1.0) * length).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        match &self.labels {
            _ if *value == 0.0 => "0".to_owned(),
            LabelStyle::Scaled { unit, suffix, decimals } => format!("{:.decimals$}{suffix}", value / unit),
            LabelStyle::Each if (1e-3..1.0).contains(value) => format!("{value}"),
            LabelStyle::Each if *value < 1e-3 => format!("{value:.0e}"),
            LabelStyle::Each => {
                let text = human::si(*value);
                // `1.00k` is `1k` for a round tick.
                text.replace(".00", "").replace(".0", "")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.key_points(10).iter().map(|v| axis.format_ext(v)).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(&Axis::steps(0.0, 100_000.0, 5)), ["0", "20k", "40k", "60k", "80k", "100k"]);
        assert_eq!(labels(&Axis::steps(0.0, 3.0, 8)), ["0", "1", "2", "3"]);
        assert_eq!(labels(&Axis::steps(7.0, 7.0, 8)), ["6", "7", "8"]);
        assert_eq!(labels(&Axis::steps(1000.0, 1100.0, 5)), ["1000", "1020", "1040", "1060", "1080", "1100"]);
        assert_eq!(labels(&Axis::linear(3.31, 3.49, 5)), ["3.35", "3.40", "3.45"]);
        assert_eq!(labels(&Axis::from_zero(3e-4, 4)), ["0", "1e-4", "2e-4", "3e-4"]);
        assert_eq!(labels(&Axis::from_zero(1.6e15, 4)), ["0", "500T", "1000T", "1500T"]);
    }

    #[test]
    fn log_ticks() {
        assert_eq!(labels(&Axis::log(0.5, 40.0, 8)), ["0.5", "1", "2", "5", "10", "20"]);
        assert_eq!(labels(&Axis::log(0.05, 40_000.0, 6)), ["0.1", "1", "10", "100", "1k", "10k"]);
    }

    #[test]
    fn places_are_within_limits_whatever_the_values() {
        let extremes = [0.0, 1.0, -1.0, 1e-320, f64::MAX, f64::MIN, 1e-9];
        for low in extremes {
            for high in extremes.into_iter().filter(|h| *h >= low) {
                let mut axes = vec![Axis::linear(low, high, 6), Axis::from_zero(high, 6)];
                if low > 0.0 {
                    axes.push(Axis::log(low, high, 6));
                }
                for axis in axes {
                    assert!(axis.low < axis.high && axis.ticks.len() <= 102, "{axis:?}");
                    for value in extremes {
                        assert!((10..=500).contains(&axis.map(&value, (10, 500))), "{axis:?} {value}");
                    }
                }
            }
        }
        let axis = Axis::linear(0.0, 10.0, 5);
        assert!(axis.map(&9.0, (500, 10)) < axis.map(&1.0, (500, 10)));
    }
}
