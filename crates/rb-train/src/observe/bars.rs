//! A chart of bars as a piece of SVG that fits the width of its page.

use plotters::prelude::*;

use super::ObserveError;
use super::axis::Axis;
use super::chart::{GRID, INK, make_responsive};

/// Bars side by side for each label, one for each series.
#[derive(Debug, Clone)]
pub struct Bars<'a> {
    /// What it shows, for people who hear the page; and for errors.
    pub name: &'static str,
    /// Names below the groups of bars.
    pub labels: &'a [String],
    /// A colour and a value for each label.
    pub series: &'a [(RGBColor, Vec<f64>)],
    /// A mark over each label's bars, such as a floor.
    pub marks: &'a [Option<f64>],
    /// Width and height of the drawing in its own units, two to a CSS pixel at full width.
    pub size: (u32, u32),
}

const MARK: RGBColor = RGBColor(0xc6, 0x28, 0x28);

impl Bars<'_> {
    /// Draws the chart, or returns `None` if there is nothing to draw.
    ///
    /// # Errors
    /// [`ObserveError::Plot`].
    pub fn draw(&self) -> Result<Option<String>, ObserveError> {
        let values = || self.series.iter().flat_map(|(_, values)| values).chain(self.marks.iter().flatten());
        if self.labels.is_empty() || values().next().is_none() {
            return Ok(None);
        }
        let high = values().copied().fold(0.0, f64::max);
        let mut svg = String::new();
        self.draw_into(&mut svg, high)
            .map_err(|e| ObserveError::Plot { chart: self.name, reason: e.to_string() })?;
        Ok(Some(make_responsive(&svg, self.size, self.name)))
    }

    fn draw_into(&self, svg: &mut String, high: f64) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let area = SVGBackend::with_string(svg, self.size).into_drawing_area();
        let groups = self.labels.len();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(20)
            .margin_right(40)
            .x_label_area_size(64)
            .y_label_area_size(110)
            .build_cartesian_2d((0..groups).into_segmented(), Axis::from_zero(high, 5))?;
        let font = ("sans-serif", 30).into_font().color(&INK);
        let label = |at: &SegmentValue<usize>| match at {
            SegmentValue::CenterOf(group) => self.labels.get(*group).cloned().unwrap_or_default(),
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .bold_line_style(GRID.stroke_width(2))
            .light_line_style(TRANSPARENT)
            .axis_style(GRID.stroke_width(2))
            .label_style(font.clone())
            .x_labels(groups.min(30))
            .x_label_formatter(&label)
            .draw()?;
        let (columns, rows) = chart.plotting_area().get_pixel_range();
        let (left, width) = (columns.start, f64::from(columns.end - columns.start) / groups as f64);
        let (top, height) = (rows.start, f64::from(rows.end - rows.start));
        let axis_high = chart.plotting_area().get_y_range().end;
        let x = |group: usize, part: f64| left + ((group as f64 + part) * width).round() as i32;
        let y = |value: f64| top + ((1.0 - value / axis_high) * height).round() as i32;
        // Each group takes four fifths of its place.
        let bar = 0.8 / self.series.len().max(1) as f64;
        for (number, (color, values)) in self.series.iter().enumerate() {
            for (group, value) in values.iter().enumerate().take(groups) {
                let from = 0.1 + bar * number as f64;
                let corners = [(x(group, from), y(*value)), (x(group, from + bar), y(0.0))];
                area.draw(&Rectangle::new(corners, color.filled()))?;
            }
        }
        for (group, mark) in self.marks.iter().enumerate().take(groups) {
            if let Some(value) = mark {
                let line = vec![(x(group, 0.05), y(*value)), (x(group, 0.95), y(*value))];
                area.draw(&PathElement::new(line, MARK.stroke_width(4)))?;
            }
        }
        area.present()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_and_some_bars() {
        let labels = ["bn".to_owned(), "en".to_owned()];
        let series = [(BLUE, vec![4.1, 4.0]), (GREEN, vec![1.0, 0.0])];
        let bars = Bars {
            name: "Rates",
            labels: &labels,
            series: &series,
            marks: &[Some(4.1), None],
            size: (1000, 500),
        };
        let svg = bars.draw().unwrap().unwrap();
        assert!(
            svg.starts_with(
                "<svg class=\"chart\" role=\"img\" aria-label=\"Rates\" viewBox=\"0 0 1000 500\""
            )
        );
        for text in ["bn", "en"] {
            assert!(svg.contains(&format!("\n{text}\n")), "{svg}");
        }
        assert_eq!(svg.matches("<rect").count(), 4);
        // The taller bar of the first group begins higher up, and the floor lies on its top.
        assert!(Bars { labels: &[], ..bars.clone() }.draw().unwrap().is_none());
        assert!(Bars { series: &[], marks: &[], ..bars }.draw().unwrap().is_none());
    }
}
