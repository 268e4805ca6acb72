//! One run of one program, which only the gate can make.

use std::fmt;

use serde_json::Value;

/// The figures of a run whose losses are finite and fall. Its fields are private and [`Run::pass`] is the only way to
/// get one, so that no table, file or plot can show the speed of another run.
#[derive(Debug, Clone)]
pub struct Run {
    tokens_per_s: f64,
    step_ms: f64,
    flops_per_token: f64,
    loss_first: f64,
    loss_last: f64,
    peak_mib: Option<f64>,
    whole: Value,
}

impl Run {
    /// The gate.
    ///
    /// # Errors
    /// What is wrong with the losses, or which figure is missing.
    pub fn pass(result: Value) -> Result<Run, String> {
        let losses: Option<Vec<f64>> = result["losses"]
            .as_array()
            .map(|all| all.iter().map(|x| x.as_f64().unwrap_or(f64::NAN)).collect());
        let losses = losses.filter(|losses| losses.len() > 1).ok_or("refused: it gave no losses")?;
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        if losses.iter().any(|loss| !loss.is_finite()) {
            return Err("refused: a loss is not finite".into());
        }
        if last >= first {
            return Err(format!("refused: the loss went from {first:.4} to {last:.4}"));
        }
        let number = |name: &str| {
            let value = result[name].as_f64().filter(|x| x.is_finite() && *x > 0.0);
            value.ok_or(format!("failed: it gave no {name}"))
        };
        Ok(Run {
            tokens_per_s: number("tokens_per_s")?,
            step_ms: number("step_ms")?,
            flops_per_token: number("flops_per_token")?,
            loss_first: first,
            loss_last: last,
            peak_mib: result["peak_mib"].as_f64().or(result["gpu"]["peak_mib"].as_f64()),
            whole: result,
        })
    }

    pub fn tokens_per_s(&self) -> f64 {
        self.tokens_per_s
    }

    pub fn step_ms(&self) -> f64 {
        self.step_ms
    }

    pub fn tflops(&self) -> f64 {
        self.tokens_per_s * self.flops_per_token / 1e12
    }

    pub fn losses(&self) -> (f64, f64) {
        (self.loss_first, self.loss_last)
    }

    pub fn peak_mib(&self) -> Option<f64> {
        self.peak_mib
    }

    /// All that the program said.
    pub fn whole(&self) -> &Value {
        &self.whole
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} tokens/s", self.tokens_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_finite_falling_losses_pass() {
        let with = |losses: Value| {
            Run::pass(
                json!({ "losses": losses, "tokens_per_s": 9.0, "step_ms": 1.0, "flops_per_token": 1e12 }),
            )
        };
        let run = with(json!([3.0, 5.0, 2.0])).unwrap();
        assert_eq!((run.to_string().as_str(), run.tflops(), run.losses()), ("9 tokens/s", 9.0, (3.0, 2.0)));
        for losses in [
            json!([3.0, 3.0]),
            json!([2.0, 3.0]),
            json!([3.0, null, 2.0]),
            json!([3.0]),
            json!("none"),
            json!(["NaN", 2.0]),
        ] {
            let refusal = with(losses.clone()).unwrap_err();
            assert!(refusal.starts_with("refused"), "{losses}: {refusal}");
        }
        let without = Run::pass(json!({ "losses": [3.0, 2.0], "step_ms": 1.0, "flops_per_token": 1e12 }));
        assert_eq!(without.unwrap_err(), "failed: it gave no tokens_per_s");
    }
}
