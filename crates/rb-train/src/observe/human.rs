//! Numbers as people read them.

/// Returns `value` with three digits and a unit prefix: `950`, `12.3k`, `1.50T`.
pub fn si(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude < 1000.0 {
        return if magnitude >= 100.0 || value == value.trunc() {
            format!("{value:.0}")
        } else {
            format!("{value:.prec$}", prec = if magnitude >= 10.0 { 1 } else { 2 })
        };
    }
    let mut scaled = value;
    let mut prefix = "";
    for next in ["k", "M", "G", "T", "P", "E"] {
        // 999.5 would be printed as 1000.
        if scaled.abs() < 999.5 {
            break;
        }
        scaled /= 1000.0;
        prefix = next;
    }
    if scaled.abs() >= 999.5 {
        return format!("{value:.2e}");
    }
    let prec = match scaled.abs() {
        m if m >= 99.95 => 0,
        m if m >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.prec$}{prefix}")
}

/// Returns a positive number with two decimals, or in scientific notation where these would say little.
pub fn short(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 || (0.1..1000.0).contains(&magnitude) {
        format!("{value:.2}")
    } else {
        format!("{value:.2e}")
    }
}

/// Returns a loss with four decimals, or in scientific notation once these mean nothing.
pub fn loss(value: f64) -> String {
    if value.abs() < 1e5 { format!("{value:.4}") } else { format!("{value:.4e}") }
}

/// Returns a time with its two largest units: `45s`, `1m12s`, `2h03m`, `3d04h`.
pub fn duration(seconds: f64) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    // The conversion saturates, so a negative time is 0 and an absurd one is a very long one.
    let s = seconds.round() as u64;
    if s < MINUTE {
        format!("{s}s")
    } else if s < HOUR {
        format!("{}m{:02}s", s / MINUTE, s % MINUTE)
    } else if s < DAY {
        format!("{}h{:02}m", s / HOUR, s % HOUR / MINUTE)
    } else {
        format!("{}d{:02}h", s / DAY, s % DAY / HOUR)
    }
}

/// Returns a number of tokens as people name it: `12.3k`, `236M`, `11.8B`, `1.50T`.
pub fn tokens(count: u64) -> String {
    si(count as f64).replace('G', "B")
}

/// Returns a count with a comma each three digits.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let cases = [
            (0.0, "0"),
            (1.5, "1.50"),
            (42.0, "42"),
            (950.4, "950"),
            (999.9, "1000"),
            (1000.0, "1.00k"),
            (12_345.0, "12.3k"),
            (999_400.0, "999k"),
            (999_600.0, "1.00M"),
            (1.5e12, "1.50T"),
            (9.996e9, "10.0G"),
            (2e22, "2.00e22"),
        ];
        for (value, text) in cases {
            assert_eq!(si(value), text);
        }
        assert_eq!(
            [short(0.0), short(0.81), short(0.004), short(12_345.0)],
            ["0.00", "0.81", "4.00e-3", "1.23e4"]
        );
        assert_eq!([loss(3.45212), loss(1e9)], ["3.4521", "1.0000e9"]);
        assert_eq!(
            [grouped(7), grouped(999), grouped(1_000), grouped(1_234_567)],
            ["7", "999", "1,000", "1,234,567"]
        );
    }

    #[test]
    fn token_counts() {
        assert_eq!(
            [tokens(950), tokens(11_800_000_000), tokens(1_500_000_000_000)],
            ["950", "11.8B", "1.50T"]
        );
    }

    #[test]
    fn durations() {
        let cases = [
            (-3.0, "0s"),
            (45.2, "45s"),
            (72.0, "1m12s"),
            (7_380.0, "2h03m"),
            (273_600.0, "3d04h"),
            (59.6, "1m00s"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }
}
