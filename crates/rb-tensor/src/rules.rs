//! Shape rules that several operations share.

use crate::{Result, Shape, ShapeError};

/// The shape that `a` and `b` broadcast to: axes are aligned at the end, and sizes must be equal or 1.
///
/// # Errors
/// [`ShapeError`] naming `b` where an axis of both is neither equal nor 1.
pub fn broadcast(op: &'static str, a: &Shape, b: &Shape) -> Result<Shape> {
    let rank = a.rank().max(b.rank());
    let size = |s: &Shape, i: usize| if i + s.rank() < rank { 1 } else { s[i + s.rank() - rank] };
    (0..rank)
        .map(|i| match (size(a, i), size(b, i)) {
            (x, y) if x == y || y == 1 => Ok(x),
            (1, y) => Ok(y),
            _ => Err(ShapeError::new(op, "b", b, format!("a shape that broadcasts with a {a}")).into()),
        })
        .collect::<Result<Vec<_>>>()
        .map(Shape::from)
}

/// Turns an axis that may count from the end (-1 is the last) into an index.
///
/// # Errors
/// [`ShapeError`] if there is no such axis.
pub fn axis(op: &'static str, shape: &Shape, axis: isize) -> Result<usize> {
    let rank = shape.rank() as isize;
    let index = if axis < 0 { axis + rank } else { axis };
    if (0..rank).contains(&index) {
        return Ok(index as usize);
    }
    Err(ShapeError::new(op, "x", shape, format!("an axis {axis}")).into())
}

/// The shape after a reduction over `axis`: kept with size 1, or removed.
pub fn reduced(shape: &Shape, axis: usize, keep: bool) -> Shape {
    let mut dims = shape.to_vec();
    if keep {
        dims[axis] = 1;
    } else {
        dims.remove(axis);
    }
    dims.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_rules() {
        let s = |d: &[usize]| Shape::from(d);
        assert_eq!(broadcast("add", &s(&[2, 1, 3]), &s(&[4, 1])).unwrap(), s(&[2, 4, 3]));
        assert_eq!(broadcast("add", &s(&[]), &s(&[5])).unwrap(), s(&[5]));
        assert_eq!(broadcast("add", &s(&[0, 3]), &s(&[1])).unwrap(), s(&[0, 3]));
        let message = broadcast("add", &s(&[2, 3]), &s(&[4])).unwrap_err().to_string();
        assert_eq!(message, "add: b has shape [4], expected a shape that broadcasts with a [2, 3]");
    }

    #[test]
    fn axes() {
        let s = Shape::from([2, 3]);
        assert_eq!(axis("sum", &s, -1).unwrap(), 1);
        assert!(axis("sum", &s, 2).unwrap_err().to_string().contains("an axis 2"));
        assert_eq!(reduced(&s, 0, true).dims(), &[1, 3]);
        assert_eq!(reduced(&s, 0, false).dims(), &[3]);
    }
}
