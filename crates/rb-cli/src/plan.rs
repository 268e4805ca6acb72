//! `rb plan`

use rb_train::forecast::{Question, forecast};

use crate::Failure;
use crate::cli::PlanArgs;

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let config = rb_train::config::load(&args.config, &args.overrides)?;
    let plan = rb_train::plan::for_card(config.clone(), args.card)?;
    let question = Question {
        card: args.gpu.clone(),
        measured: args.measured.clone(),
        tokens_per_s: args.tokens_per_second,
        hours: args.hours,
        money: args.money,
        price: args.price,
    };
    let forecast = forecast(config, plan.plan.num_parameters, &question)?;
    print!("{}{}", plan.table(), forecast.table());
    Ok(plan.check()?)
}
