//! Shapes: row-major, contiguous, any rank.

use std::fmt;
use std::ops::Deref;

use crate::{Result, TensorError};

/// The sizes of a tensor's axes, outermost first. A scalar has rank 0 and one element.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements. The product was checked when the tensor was made.
    pub fn numel(&self) -> usize {
        self.0.iter().product()
    }

    /// Number of elements, or an error where the product overflows.
    pub fn checked_numel(&self, op: &'static str) -> Result<usize> {
        self.0
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .filter(|&n| n <= isize::MAX as usize / 8)
            .ok_or_else(|| TensorError::TooLarge { op, shape: self.to_string() })
    }

    /// Size of the last axis; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }

    /// Product of all axes but the last; 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.0.iter().rev().skip(1).product()
    }

    /// The sizes as a slice.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// This shape with its last axis replaced (a scalar becomes rank 1).
    pub fn with_last(&self, last: usize) -> Shape {
        let mut dims = self.0.clone();
        match dims.last_mut() {
            Some(d) => *d = last,
            None => dims.push(last),
        }
        Shape(dims)
    }

    /// Splits around `axis`: (product before, size of the axis, product after).
    pub fn split_at_axis(&self, axis: usize) -> (usize, usize, usize) {
        (self.0[..axis].iter().product(), self.0[axis], self.0[axis + 1..].iter().product())
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Shape(dims)
    }
}
impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape(dims.to_vec())
    }
}
impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.to_vec())
    }
}
impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}
impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}
