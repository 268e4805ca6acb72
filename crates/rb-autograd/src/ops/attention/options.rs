//! How scores are made and how far a query sees.

use crate::{AutogradError, Result};

/// Choices of an attention beside its mask. A number alone is a scale: `0.125.into()`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the products of queries and keys, `1 / sqrt(D)` in most models.
    pub scale: f64,
    /// Scores become `softcap * tanh(score / softcap)`: they stay between `-softcap` and `softcap`.
    pub softcap: Option<f64>,
    /// Of the keys that the mask shows, a query sees at most this many, the last ones. With a causal mask this is
    /// a sliding window that counts the query's own position.
    pub window: Option<usize>,
}

impl From<f64> for AttentionOptions {
    fn from(scale: f64) -> Self {
        AttentionOptions { scale, softcap: None, window: None }
    }
}

impl AttentionOptions {
    /// Checks what no shape decides.
    ///
    /// # Errors
    /// [`AutogradError::Argument`] for a window of 0 or a cap that is not finite and above 0.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        let wrong = |argument, got: String, expected: &str| {
            Err(AutogradError::Argument { op, argument, got, expected: expected.into() })
        };
        match (self.softcap, self.window) {
            (Some(cap), _) if !(cap.is_finite() && cap > 0.0) => {
                wrong("softcap", cap.to_string(), "a finite number above 0")
            }
            (_, Some(0)) => wrong("window", "0".into(), "at least 1"),
            _ => Ok(()),
        }
    }
}
