//! `rb export`

use rb_infer::export::{GgufFormat, save_folder, save_gguf};
use rb_nn::weights::SaveOptions;
use rb_tensor::io::FloatFormat;

use crate::cli::{ExportArgs, ExportDtype, ExportFormat};
use crate::{Failure, model};

pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    match args.format {
        ExportFormat::Hf => hugging_face(args),
        ExportFormat::Gguf => gguf(args),
    }
}

fn hugging_face(args: &ExportArgs) -> Result<(), Failure> {
    let format = match args.dtype {
        ExportDtype::F32 => FloatFormat::F32,
        ExportDtype::Bf16 => FloatFormat::BF16,
        ExportDtype::F16 => FloatFormat::F16,
        ExportDtype::Q8_0 => {
            let message = "--dtype q8_0 is of GGUF alone; add --format gguf, or choose f32, bf16 or f16";
            return Err(Failure::new(2, message));
        }
    };
    let folder = model::folder(&args.model)?;
    let (model, params) = model::load(&folder)?;
    let tokenizer = model::tokenizer(&folder, model.config())?;
    let shard_bytes = args.shard_mib.map(|mib| mib as usize * (1 << 20));
    let options = SaveOptions { format, shard_bytes };
    save_folder(model.config(), &params, &tokenizer, &args.out, &options, args.overwrite)
        .map_err(Failure::failed)?;
    println!("{}: {} as {}", args.out.display(), folder.display(), format.torch_name());
    Ok(())
}

fn gguf(args: &ExportArgs) -> Result<(), Failure> {
    let format = match args.dtype {
        ExportDtype::F32 => GgufFormat::F32,
        ExportDtype::F16 => GgufFormat::F16,
        ExportDtype::Q8_0 => GgufFormat::Q8_0,
        ExportDtype::Bf16 => {
            return Err(Failure::new(2, "--dtype bf16 is of Hugging Face folders; choose f32, f16 or q8_0"));
        }
    };
    if args.shard_mib.is_some() {
        return Err(Failure::new(2, "--shard-mib is of Hugging Face folders; a GGUF file is one file"));
    }
    if args.out.is_dir() {
        let message = format!("{}: is a folder; name the GGUF file to write", args.out.display());
        return Err(Failure::new(2, message));
    }
    if args.out.exists() && !args.overwrite {
        let message =
            format!("{}: is there already; choose another name or pass --overwrite", args.out.display());
        return Err(Failure::new(2, message));
    }
    let folder = model::folder(&args.model)?;
    let (model, params) = model::load(&folder)?;
    let tokenizer = model::tokenizer(&folder, model.config())?;
    let name = args.out.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let note = save_gguf(model.config(), &params, &tokenizer, &name, &args.out, format);
    let note = note.map_err(Failure::failed)?;
    println!("{}: {}", args.out.display(), folder.display());
    if let Some(note) = note {
        println!("{note}");
    }
    Ok(())
}
