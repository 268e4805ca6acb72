//! Engines that several operation files share; no operations themselves.
