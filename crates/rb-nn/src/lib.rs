//! rb-nn
