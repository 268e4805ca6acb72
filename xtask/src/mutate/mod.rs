//! `cargo xtask mutate`: does a test notice when backward code is changed?
//!
//! A *mutant* is the host's backward code with one operator, sign, constant or comparison changed. All of them are
//! compiled at once into a copy of `rb-autograd` under `target/mutants`, each behind a question to the environment
//! of the process. The unit tests that run through a mutant are then run with it active, until one fails. A mutant
//! that passes them all is a gap in the tests, unless a checked-in list says why it changes nothing.

mod equivalent;
mod project;
mod rewrite;
mod select;
mod trial;

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use clap::Args;

use crate::error::Error;
use crate::tree::Tree;
use equivalent::Equivalents;
use rewrite::Mutant;
use select::Source;
use trial::Verdict;

#[derive(Args)]
pub struct Options {
    /// Try so many mutants, drawn at random; left out, all
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Seed of the draw; left out, taken from the clock and printed
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Try only mutants of source files whose path has this in it
    #[arg(long, value_name = "TEXT")]
    file: Option<String>,
    /// Print the mutants and try none
    #[arg(long)]
    list: bool,
}

/// Files that can hold backward code of the host, from the folder `src` of the crate.
fn is_host_code(path: &str) -> bool {
    let of_gpu = ["cuda", "select.rs", "wgmma.rs"].iter().any(|name| path.contains(name));
    !of_gpu && (path.starts_with("ops/") || ["host.rs", "float.rs"].contains(&path))
}

/// Runs it; true if every mutant that is not listed as equivalent was noticed.
pub fn run(root: &Path, options: &Options) -> Result<bool, Error> {
    let (files, mutants) = mutants(root)?;
    let equivalents = Equivalents::load(root)?;
    let problems = equivalents.problems(&mutants);
    problems.iter().for_each(|problem| println!("error: {problem}"));
    let chosen = choose(&mutants, &equivalents, options);
    if options.list {
        chosen.iter().for_each(|mutant| println!("{}", describe(mutant)));
        println!("{} mutants", chosen.len());
        return Ok(problems.is_empty());
    }
    let start = Instant::now();
    project::write(root, &files, mutants.len())?;
    let program = project::build(root)?;
    let built = start.elapsed();
    // Operations on a dry GPU compute nothing, and a test of every operation says nothing that its own does not.
    let tests = trial::explore(&program, &trial::folder(root)?, |name| !name.contains("gpu"))?;
    println!(
        "{} mutants in {} files, built in {:.0} s; {} tests, traced in {:.0} s",
        mutants.len(),
        files.len(),
        built.as_secs_f64(),
        tests.len(),
        (start.elapsed() - built).as_secs_f64()
    );
    let report = |done: usize| {
        if done.is_multiple_of(100) {
            println!("{done} of {}", chosen.len());
        }
    };
    let verdicts = trial::judge(&program, &tests, &chosen, &report)?;
    let summary = Summary::new(&chosen, &verdicts, &equivalents);
    print!("{}", summary.text);
    println!("{}", summary.line(mutants.len(), start.elapsed()));
    Ok(problems.is_empty() && summary.survived == 0 && summary.listed_but_killed == 0)
}

/// Paths and texts of the rewritten files.
type Files = Vec<(String, String)>;

/// Rewritten files, and all mutants.
fn mutants(root: &Path) -> Result<(Files, Vec<Mutant>), Error> {
    let tree = Tree::load(root)?;
    let prefix = format!("{}/src/", project::CRATE);
    let mut sources = Vec::new();
    for (path, text) in tree.texts() {
        let Some(name) = path.strip_prefix(&prefix).filter(|name| is_host_code(name)) else { continue };
        let source = Source::parse(name, text)
            .map_err(|error| Error::Program { program: "syn".into(), detail: format!("{path}: {error}") })?;
        sources.push(source);
    }
    let functions = select::reached(&sources, "host_backward");
    let (mut files, mut mutants) = (Vec::new(), Vec::new());
    for (at, source) in sources.iter().enumerate() {
        let own: Vec<_> = functions.iter().filter(|function| function.file == at).collect();
        let (text, found) = rewrite::rewrite(source, &own, mutants.len() as u32 + 1);
        if !found.is_empty() {
            files.push((source.path.clone(), text));
            mutants.extend(found);
        }
    }
    Ok((files, mutants))
}

/// The mutants to try: all, or a sample of those that are not listed as equivalent.
fn choose<'m>(mutants: &'m [Mutant], equivalents: &Equivalents, options: &Options) -> Vec<&'m Mutant> {
    let fits = |mutant: &&Mutant| options.file.as_ref().is_none_or(|text| mutant.file.contains(text));
    let mut chosen: Vec<&Mutant> = mutants.iter().filter(fits).collect();
    if let Some(size) = options.sample {
        let clock = || SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
        let seed = options.seed.unwrap_or_else(clock);
        println!("sample of {size}, seed {seed}");
        chosen.retain(|mutant| equivalents.reason(mutant).is_none());
        shuffle(&mut chosen, seed);
        chosen.truncate(size);
        chosen.sort_by_key(|mutant| mutant.number);
    }
    chosen
}

/// Fisher and Yates with the generator SplitMix64.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for end in (1..items.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        items.swap(end, ((bits ^ (bits >> 31)) % (end as u64 + 1)) as usize);
    }
}

fn describe(mutant: &Mutant) -> String {
    let Mutant { number, file, line, source, change } = mutant;
    format!("{}/src/{file}:{line}: [{number}] {change}    in `{source}`", project::CRATE)
}

/// What became of the mutants that were tried.
#[derive(Default)]
struct Summary {
    /// A line for each survivor.
    text: String,
    killed: usize,
    /// Of `killed`, those whose test did not end in time.
    hung: usize,
    survived: usize,
    equivalent: usize,
    listed_but_killed: usize,
}

impl Summary {
    fn new(chosen: &[&Mutant], verdicts: &[Verdict], equivalents: &Equivalents) -> Summary {
        let mut summary = Summary::default();
        // An entry of the list is a line and a change; the same may stand in two places, of which one matters.
        let same =
            |a: &Mutant, b: &Mutant| (&a.file, &a.source, &a.change) == (&b.file, &b.source, &b.change);
        let survives = |mutant: &Mutant| {
            let pairs = chosen.iter().zip(verdicts);
            pairs.into_iter().any(|(m, verdict)| same(m, mutant) && matches!(verdict, Verdict::Survived(_)))
        };
        for (mutant, verdict) in chosen.iter().zip(verdicts) {
            match (verdict, equivalents.reason(mutant)) {
                (Verdict::Killed(_), None) => summary.killed += 1,
                (Verdict::Hung(_), None) => {
                    summary.killed += 1;
                    summary.hung += 1;
                }
                (Verdict::Killed(_) | Verdict::Hung(_), Some(_)) if survives(mutant) => summary.killed += 1,
                (Verdict::Killed(test) | Verdict::Hung(test), Some(_)) => {
                    summary.listed_but_killed += 1;
                    summary.text += &format!(
                        "error: {}: listed as equivalent, but {test} notices it; remove it from {}\n",
                        describe(mutant),
                        equivalent::LIST
                    );
                }
                (Verdict::Survived(_), Some(_)) => summary.equivalent += 1,
                (Verdict::Survived(tests), None) => {
                    summary.survived += 1;
                    summary.text +=
                        &format!("error: survived: {} ({tests} tests run through it)\n", describe(mutant));
                }
            }
        }
        summary
    }

    fn line(&self, num_mutants: usize, time: Duration) -> String {
        let judged = self.killed + self.survived;
        let rate = 100.0 * self.killed as f64 / judged.max(1) as f64;
        format!(
            "{} killed, {} survived of {judged} mutants tried ({num_mutants} in all; {} equivalent; {} killed by the time limit): kill rate {rate:.1} % in {:.0} s",
            self.killed,
            self.survived,
            self.equivalent,
            self.hung,
            time.as_secs_f64()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_with_arithmetic_has_mutants() {
        let (files, mutants) = mutants(&crate::tree::root()).unwrap();
        let names: Vec<&str> = files.iter().map(|(path, _)| path.as_str()).collect();
        for name in ["ops/rms_norm.rs", "ops/cross_entropy.rs", "ops/shared/attention.rs", "host.rs"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(names.iter().all(|name| !name.contains("cuda")));
        for (at, mutant) in mutants.iter().enumerate() {
            assert_eq!(mutant.number as usize, at + 1);
        }
        for (path, text) in &files {
            syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
    }

    #[test]
    fn a_seed_gives_the_same_sample_and_another_seed_another() {
        let drawn = |seed| {
            let mut items: Vec<usize> = (0..100).collect();
            shuffle(&mut items, seed);
            items
        };
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        let mut sorted = drawn(7);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn survivors_and_wrong_entries_are_told_apart() {
        let mutant = Mutant {
            number: 1,
            file: "ops/a.rs".into(),
            line: 7,
            source: "a + b".into(),
            change: "a + b -> a - b".into(),
        };
        let none = Equivalents::default();
        let summary =
            Summary::new(&[&mutant, &mutant], &[Verdict::Killed("t".into()), Verdict::Survived(3)], &none);
        assert_eq!((summary.killed, summary.survived), (1, 1));
        assert!(summary.text.contains("src/ops/a.rs:7: [1] a + b -> a - b"), "{}", summary.text);
        assert!(summary.text.matches("survived").count() == 1 && summary.listed_but_killed == 0);
        let list = equivalent::tests::list("ops/a.rs", "a + b", "a + b -> a - b");
        let killed = [Verdict::Killed("t".into()), Verdict::Hung("t".into())];
        assert_eq!(Summary::new(&[&mutant, &mutant], &killed, &list).listed_but_killed, 2);
        let mixed = [Verdict::Killed("t".into()), Verdict::Survived(3)];
        let seen = Summary::new(&[&mutant, &mutant], &mixed, &list);
        assert_eq!((seen.killed, seen.equivalent, seen.listed_but_killed), (1, 1, 0));
        assert!(summary.line(5, Duration::from_secs(2)).contains("kill rate 50.0 %"));
    }
}
