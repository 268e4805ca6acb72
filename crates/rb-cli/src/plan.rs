//! `rb plan`

use crate::Failure;
use crate::cli::PlanArgs;

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let config = rb_train::config::load(&args.config, &args.overrides)?;
    let plan = rb_train::plan::for_card(config, args.card)?;
    print!("{}", plan.table());
    Ok(plan.check()?)
}
