//! rb-train
