//! The points of a curve: smoothing, and thinning that keeps spikes.

/// A point of a curve: step and value.
pub type Point = (f64, f64);

/// Points that a drawn line has at most: about one for each pixel, and 30 KiB of SVG.
pub const MAX_POINTS: usize = 2000;

/// Returns at most `max_points` of the points, in order, with the first, the last, the highest and the lowest.
///
/// The points between the ends are cut into runs of equal length, and each run gives its minimum and its
/// maximum: a spike of a single step stays as high as it was.
pub fn thin(points: &[Point], max_points: usize) -> Vec<Point> {
    let max_points = max_points.max(4);
    if points.len() <= max_points {
        return points.to_vec();
    }
    let (first, last) = (points[0], points[points.len() - 1]);
    let inner = &points[1..points.len() - 1];
    let run_len = inner.len().div_ceil((max_points - 2) / 2);
    let mut out = Vec::with_capacity(max_points);
    out.push(first);
    for run in inner.chunks(run_len) {
        let (mut low, mut high) = (0, 0);
        for (i, point) in run.iter().enumerate() {
            if point.1 < run[low].1 {
                low = i;
            }
            if point.1 > run[high].1 {
                high = i;
            }
        }
        out.push(run[low.min(high)]);
        if low != high {
            out.push(run[low.max(high)]);
        }
    }
    out.push(last);
    out
}

/// Returns the median of about a fiftieth of the points around each, at no more than [`MAX_POINTS`] places.
///
/// Around it, because an average of the past alone lies above a falling curve; the median, because a mean makes
/// a plateau of a spike. Near an end the window shrinks on both sides. `None` for a curve too short to need it.
pub fn smooth(points: &[Point]) -> Option<Vec<Point>> {
    const MIN_POINTS: usize = 20;
    if points.len() < MIN_POINTS {
        return None;
    }
    let last = points.len() - 1;
    let reach = (points.len() / 100).clamp(2, 250);
    let median_at = |i: usize| {
        let reach = reach.min(i).min(last - i);
        let window = points[i - reach..=i + reach].iter().map(|p| p.1);
        (points[i].0, median(window).unwrap_or(points[i].1))
    };
    let stride = points.len().div_ceil(MAX_POINTS - 1);
    let mut smoothed: Vec<Point> = (0..last).step_by(stride).map(median_at).collect();
    smoothed.push(median_at(last));
    Some(smoothed)
}

/// Returns the middle of the values, or `None` if there are none.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    if values.is_empty() {
        return None;
    }
    let middle = values.len() / 2;
    Some(*values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spikes_survive_thinning() {
        let mut points: Vec<Point> =
            (0..100_000).map(|i| (f64::from(i), 3.0 + f64::from(i % 7) * 0.01)).collect();
        points[54_321].1 = 99.0;
        points[77_777].1 = -5.0;
        let thinned = thin(&points, MAX_POINTS);
        assert!(thinned.len() <= MAX_POINTS && thinned.len() > MAX_POINTS / 2, "{}", thinned.len());
        assert!(thinned.contains(&(54_321.0, 99.0)) && thinned.contains(&(77_777.0, -5.0)));
        assert_eq!((thinned[0], thinned[thinned.len() - 1]), (points[0], points[99_999]));
        assert!(thinned.windows(2).all(|w| w[0].0 < w[1].0));
    }

    #[test]
    fn thinning_bounds_hold_at_odd_sizes() {
        for len in [0, 1, 2, 1999, 2000, 2001, 2002, 3999, 4001] {
            let points: Vec<Point> = (0..len).map(|i| (f64::from(i), f64::from(i * 37 % 11))).collect();
            let thinned = thin(&points, MAX_POINTS);
            assert!(
                thinned.len() <= MAX_POINTS && (len > 2000 || thinned == points),
                "{len}: {}",
                thinned.len()
            );
        }
    }

    #[test]
    fn smoothing_has_no_lag_no_bias_at_the_ends_and_no_plateau() {
        assert!(smooth(&[(0.0, 1.0); 19]).is_none());
        let mut falling: Vec<Point> = (0..1000).map(|i| (f64::from(i), 1000.0 / f64::from(i + 1))).collect();
        assert_eq!(smooth(&falling).unwrap(), falling);
        falling[500].1 = 1e9;
        assert!(smooth(&falling).unwrap()[500..].iter().all(|p| p.1 < 2.1));
        let noisy: Vec<Point> = (0..1000).map(|i| (f64::from(i), f64::from(i * 37 % 101))).collect();
        assert!(smooth(&noisy).unwrap()[20..980].iter().all(|p| (p.1 - 50.0).abs() < 25.0));
    }

    #[test]
    fn smoothed_long_curve_is_thin() {
        for len in [1999, 2000, 2001, 100_000] {
            let points: Vec<Point> = (0..len).map(|i| (f64::from(i), 1.0)).collect();
            let smoothed = smooth(&points).unwrap();
            assert!(
                smoothed.len() <= MAX_POINTS && smoothed.len() >= MAX_POINTS / 2,
                "{len}: {}",
                smoothed.len()
            );
            assert_eq!((smoothed[0], smoothed[smoothed.len() - 1]), (points[0], points[points.len() - 1]));
        }
    }

    #[test]
    fn median_of_a_few() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median(std::iter::empty()), None);
    }
}
