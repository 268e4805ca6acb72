//! Which published defects of Candle can be seen in this release on a CPU: one line each. See `../../README.md`.

#[path = "../../common.rs"]
mod common;
mod fused;
mod kin;
mod memory;
mod models;

fn main() -> candle::Result<()> {
    println!("candle-core, candle-nn, candle-transformers 0.11.1, CPU");
    fused::run()?;
    models::run()?;
    memory::run()?;
    kin::run()
}
