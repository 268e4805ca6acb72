//! `rb logits` writes what `bench-scripts/check_transformers.py` reads.

mod common;

use common::Place;
use rb_tensor::{DType, io};

#[test]
fn fixed_inputs_and_their_scores() {
    let place = Place::new();
    place.run("run", 1);
    let output = place.good(&["logits", "run", "--out", "a"]);
    assert!(output.contains("step-1 for lengths 1, 7"), "{output}");
    place.good(&["logits", "run/checkpoints/step-1", "--out", "b"]);
    assert_eq!(std::fs::read(place.path("a")).unwrap(), std::fs::read(place.path("b")).unwrap());
    let tensors = io::read_safetensors(&place.path("a")).unwrap();
    // The model has 16 positions, so 63 and more are left out.
    assert_eq!(tensors.keys().collect::<Vec<_>>(), ["ids_1", "ids_7", "logits_1", "logits_7"]);
    assert_eq!((tensors["ids_7"].shape().dims(), tensors["ids_7"].dtype()), (&[2, 7][..], DType::I32));
    assert_eq!(tensors["logits_7"].shape().dims(), [2, 7, 293]);
    // With another seed come other inputs.
    place.good(&["logits", "run", "--out", "c", "--seed", "1"]);
    assert_ne!(std::fs::read(place.path("a")).unwrap(), std::fs::read(place.path("c")).unwrap());
}
