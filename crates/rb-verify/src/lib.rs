//! rb-verify
