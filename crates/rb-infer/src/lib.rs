//! rb-infer
