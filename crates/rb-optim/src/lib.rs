//! rb-optim
