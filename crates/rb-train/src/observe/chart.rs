//! One chart as a piece of SVG that fits the width of its page.

use super::ObserveError;
use super::axis::Axis;
use super::series::{MAX_POINTS, Point, median, smooth, thin};
use plotters::prelude::*;

/// Curves shorter than this are drawn with a dot at each point.
const DOTS_BELOW: usize = 40;

/// How the vertical axis is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Spans the values.
    Fit,
    /// Spans 0 to the largest value.
    FromZero,
}

/// A chart to draw: a curve against steps, perhaps with points and marks.
#[derive(Debug, Clone)]
pub struct Chart<'a> {
    /// What it shows, for people who hear the page; and for errors.
    pub name: &'static str,
    pub points: &'a [Point],
    /// Also draw a running median, with the curve itself lighter.
    pub smoothed: bool,
    /// Measured now and then, drawn as dots joined by a line.
    pub sparse: &'a [Point],
    /// Steps with a vertical line, and its colour.
    pub marks: &'a [(f64, RGBColor)],
    pub scale: Scale,
    pub color: RGBColor,
    /// Width and height of the drawing in its own units, two to a CSS pixel at full width.
    pub size: (u32, u32),
}

/// What was drawn.
pub struct Drawn {
    pub svg: String,
    /// The vertical axis is logarithmic, because of spikes.
    pub log: bool,
    /// There is a running median.
    pub smoothed: bool,
}

/// Colour of the dots of [`Chart::sparse`].
pub const SPARSE_COLOR: RGBColor = RGBColor(0xd9, 0x5f, 0x02);
pub(super) const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xec);
pub(super) const INK: RGBColor = RGBColor(0x47, 0x50, 0x5c);

impl Chart<'_> {
    /// Draws the chart, or returns `None` if there is nothing to draw.
    pub fn draw(&self) -> Result<Option<Drawn>, ObserveError> {
        let all = || self.points.iter().chain(self.sparse);
        let Some(first) = all().next() else { return Ok(None) };
        let bounds = |of: fn(&Point) -> f64| {
            all().fold((of(first), of(first)), |(low, high), p| (low.min(of(p)), high.max(of(p))))
        };
        let (x_low, x_high) = bounds(|p| p.0);
        let (y_low, y_high) = bounds(|p| p.1);
        let x = Axis::steps(x_low, x_high, if self.size.0 > 1500 { 10 } else { 6 });
        let middle = median(all().map(|p| p.1)).unwrap_or(y_high);
        let log = y_low > 0.0 && y_high > 20.0 * middle;
        let y = match self.scale {
            _ if log => Axis::log(y_low, y_high, 7),
            Scale::FromZero if y_low >= 0.0 => Axis::from_zero(y_high, 5),
            _ => Axis::linear(y_low, y_high, 6),
        };
        let median_line = if self.smoothed { smooth(self.points) } else { None };
        let smoothed = median_line.is_some();
        let mut svg = String::new();
        self.draw_into(&mut svg, x, y, median_line)
            .map_err(|e| ObserveError::Plot { chart: self.name, reason: e.to_string() })?;
        Ok(Some(Drawn {
            svg: make_responsive(&svg, self.size, &format!("{} by step", self.name)),
            log,
            smoothed,
        }))
    }

    fn draw_into(
        &self,
        svg: &mut String,
        x: Axis,
        y: Axis,
        median_line: Option<Vec<Point>>,
    ) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let area = SVGBackend::with_string(svg, self.size).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(20)
            .margin_right(40)
            .x_label_area_size(88)
            .y_label_area_size(110)
            .build_cartesian_2d(x, y)?;
        let font = ("sans-serif", 32).into_font().color(&INK);
        chart
            .configure_mesh()
            .bold_line_style(GRID.stroke_width(2))
            .light_line_style(TRANSPARENT)
            .axis_style(GRID.stroke_width(2))
            .label_style(font.clone())
            .axis_desc_style(font)
            .x_desc("step")
            .set_all_tick_mark_size(8)
            .draw()?;
        let vertical = chart.plotting_area().get_y_range();
        for &(step, color) in self.marks {
            let line = [(step, vertical.start), (step, vertical.end)];
            chart.draw_series([PathElement::new(line, color.mix(0.55).stroke_width(2))])?;
        }

        let line =
            |points: Vec<Point>, color: RGBAColor, width| LineSeries::new(points, color.stroke_width(width));
        let raw = thin(self.points, MAX_POINTS);
        if raw.len() < DOTS_BELOW {
            chart.draw_series(raw.iter().map(|&p| Circle::new(p, 5, self.color.filled())))?;
        }
        let raw_color = self.color.mix(if median_line.is_some() { 0.35 } else { 1.0 });
        chart.draw_series(line(raw, raw_color, if median_line.is_some() { 2 } else { 4 }))?;
        if let Some(median_line) = median_line {
            chart.draw_series(line(median_line, self.color.mix(1.0), 4))?;
        }
        if !self.sparse.is_empty() {
            let sparse = thin(self.sparse, MAX_POINTS);
            if sparse.len() < 200 {
                chart.draw_series(sparse.iter().map(|&p| Circle::new(p, 7, SPARSE_COLOR.filled())))?;
            }
            chart.draw_series(line(sparse, SPARSE_COLOR.mix(1.0), 3))?;
        }
        area.present()
    }
}

/// Replaces the fixed size of a drawing by one that the page gives, and names the drawing.
pub(super) fn make_responsive(svg: &str, (width, height): (u32, u32), label: &str) -> String {
    let fixed = format!("<svg width=\"{width}\" height=\"{height}\" ");
    svg.replacen(&fixed, &format!("<svg class=\"chart\" role=\"img\" aria-label=\"{label}\" "), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[Point]) -> Chart<'_> {
        Chart {
            name: "Loss",
            points,
            smoothed: true,
            sparse: &[],
            marks: &[],
            scale: Scale::Fit,
            color: BLUE,
            size: (1000, 500),
        }
    }

    #[test]
    fn nothing_one_point_and_a_constant() {
        assert!(chart(&[]).draw().unwrap().is_none());
        let one = chart(&[(1.0, 4.0)]).draw().unwrap().unwrap();
        assert!(one.svg.contains("<circle") && !one.smoothed && !one.log);
        let constant = chart(&[(1.0, 0.0), (2.0, 0.0)]);
        for scale in [Scale::Fit, Scale::FromZero] {
            assert!(Chart { scale, ..constant.clone() }.draw().unwrap().is_some());
        }
    }

    #[test]
    fn svg_takes_the_width_of_the_page() {
        let svg = chart(&[(1.0, 4.0), (2.0, 3.0)]).draw().unwrap().unwrap().svg;
        assert!(svg.starts_with(
            "<svg class=\"chart\" role=\"img\" aria-label=\"Loss by step\" viewBox=\"0 0 1000 500\""
        ));
        assert!(svg.trim_end().ends_with("</svg>") && svg.contains("font-family=\"sans-serif\""));
    }

    #[test]
    fn spike_makes_the_axis_logarithmic() {
        let mut points: Vec<Point> = (0..100).map(|i| (f64::from(i), 1.0)).collect();
        assert!(!chart(&points).draw().unwrap().unwrap().log);
        points[50].1 = 500.0;
        assert!(chart(&points).draw().unwrap().unwrap().log);
        points[51].1 = 0.0;
        assert!(!chart(&points).draw().unwrap().unwrap().log);
    }

    #[test]
    fn long_curve_is_thinned_and_extremes_do_not_fail() {
        let points: Vec<Point> = (0..100_000).map(|i| (f64::from(i), f64::from(i % 13))).collect();
        let svg = chart(&points).draw().unwrap().unwrap().svg;
        assert!(svg.len() < 120_000, "{}", svg.len());
        assert!(chart(&[(0.0, f64::MIN), (1e15, f64::MAX)]).draw().unwrap().is_some());
    }
}
