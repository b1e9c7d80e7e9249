"""Coefficients are trained, saved and loaded by every route of transformers, peft and Accelerate, or it says why not."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from attractor.attention import coefficients, pdes

transformers = pytest.importorskip("transformers")

from attractor.integrations import transformers as hf  # noqa: E402
from tests.integrations.test_transformers import (  # noqa: E402
    DECODERS,
    IDS,
    TOKENS,
    bert,
    build,
    gpt2,
    llama,
    logits,
    two_berts,
)

FOUR = [*hf.NAMES.values()]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _registered():
    hf.register()


def stirred(model):
    """The model with coefficients that are not those of any start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".pde." in name:
                parameter += torch.rand(parameter.shape, generator=generator).to(parameter)
    return model


def trained(model, updates=5):
    model.train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(updates):
        optimiser.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimiser.step()
    return model.eval()


# from_pretrained


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_from_pretrained_restores_what_add_pde_added(make, name, tmp_path):
    model = stirred(hf.add_pde(build(make, "sdpa"), name, steps=3, dt=0.5, per_head=True))
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForMaskedLM if make is bert else transformers.AutoModelForCausalLM
    for kind in (type(model), auto):
        again = kind.from_pretrained(tmp_path)
        assert type(again) is type(model)
        assert torch.equal(logits(again), logits(model))
        assert again.config._attn_implementation == f"pde_{name}"
    base, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(".pde." in key for key in (*info["missing_keys"], *info["unexpected_keys"]))
    assert coefficients(base)[0]["mean"] == coefficients(model)[0]["mean"]
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(IDS).last_hidden_state, base(IDS).last_hidden_state)


def test_constants_and_parts(tmp_path):
    model = hf.add_pde(build(gpt2, "sdpa"), pdes.ReactionDiffusion(0.2, 0.3, split=True), learn=False)
    model.save_pretrained(tmp_path / "constant")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "constant")
    assert torch.equal(logits(again), logits(model))
    whole, given = two_berts()
    stirred(hf.add_pde(whole.eval(), "wave", steps=2)).save_pretrained(tmp_path / "whole")
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(again(**given).logits, whole(**given).logits)
    part, given = two_berts()
    stirred(hf.add_pde(part.eval().encoder, "wave", steps=2))
    part.save_pretrained(tmp_path / "part")
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "part")
    assert torch.equal(again(**given).logits, part(**given).logits)


def test_a_model_of_such_a_config_has_a_pde_before_its_weights(tmp_path):
    model = stirred(hf.add_pde(build(gpt2, "sdpa").float(), "diffusion"))
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for again in (
        transformers.GPT2LMHeadModel(config),
        transformers.AutoModelForCausalLM.from_config(config),
    ):
        again.load_state_dict(model.state_dict())
        assert torch.equal(logits(again.eval()), logits(model))
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(config)
    assert {*empty.state_dict()} == {*model.state_dict()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coefficients_stay_in_float32(dtype, tmp_path):
    model = stirred(hf.add_pde(build(gpt2, "sdpa").float(), "wave"))
    model.save_pretrained(tmp_path)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert half.lm_head.weight.dtype == dtype
    assert [r["mean"] for r in coefficients(half)] == [r["mean"] for r in coefficients(model)]


def test_another_attention_is_refused(tmp_path):
    hf.add_pde(build(gpt2, "sdpa"), "diffusion").save_pretrained(tmp_path)
    for kind in (transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"'sdpa', but .* was saved with 'pde_diffusion'; leave it"):
            kind.from_pretrained(tmp_path, attn_implementation="sdpa")


def test_coefficients_that_are_not_there_or_have_no_place(tmp_path):
    model = stirred(hf.add_pde(build(gpt2, "sdpa"), "diffusion"))
    state = model.state_dict()
    part = {name: x for name, x in state.items() if "h.1.attn.pde" not in name}
    model.save_pretrained(tmp_path / "part", state_dict=part)
    with pytest.raises(
        ValueError, match=r"has no numbers for transformer\.h\.1\.attn\.pde\.learned\.alpha"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "part")
    model.save_pretrained(tmp_path / "whole")
    plain = build(gpt2, "sdpa")
    with pytest.raises(
        ValueError, match=r"a PDE in \d+ modules, and GPT2LMHeadModel has one in 0 modules"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", config=plain.config)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no PDE there: call add_pde on the model"):
        plain.load_state_dict(state, strict=False)
    plain.save_pretrained(tmp_path / "plain")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    plain.load_state_dict(plain.state_dict())


def test_a_part_that_shares_the_config_of_the_whole(tmp_path):
    config = transformers.BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, vocab_size=50,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
        forced_eos_token_id=None, decoder_start_token_id=1, **TOKENS | {"eos_token_id": 2},
    )  # fmt: skip
    for learn in (True, False):
        model = transformers.BartForConditionalGeneration(config).eval()
        hf.add_pde(model.model.encoder, "diffusion", learn=learn)
        model.save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match=r"was not saved whole|in 1 modules, and Bart.* in 3 modules"
        ):
            transformers.BartForConditionalGeneration.from_pretrained(tmp_path)
        del config.pde_attention, config.attn_implementation


def without_attractor(folder, before=""):
    code = f"{before}\nimport transformers\ntransformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    env = {**os.environ, "PYTHONPATH": str(Path(hf.__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stderr


@pytest.mark.slow
def test_a_process_that_has_not_registered_cannot_load_it(tmp_path):
    hf.add_pde(build(gpt2, "sdpa"), "wave").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "pde_wave"
    message = 'ValueError: Specified `attn_implementation="pde_wave"` is not supported'
    assert message in without_attractor(tmp_path)
    assert message not in without_attractor(
        tmp_path, "from attractor.integrations.transformers import register; register()"
    )


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", FOUR)
def test_folders_of_earlier_versions(name, per_head, tmp_path):
    """They hold logits of the coefficients, and no version in their config."""
    model = hf.add_pde(build(gpt2, "sdpa").float(), name, start="paper", per_head=per_head)
    stirred(model).save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    generator, old = torch.Generator().manual_seed(0), {}
    for key, x in state.items():
        if ".pde." in key:
            old[key.replace("_raw", "_logit")] = torch.randn(x.shape, generator=generator)
        else:
            old[key] = x
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("version", "modules"):
        del config["pde_attention"][key]
    del config["attn_implementation"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    want = hf.add_pde(build(gpt2, "sdpa").float(), name, per_head=per_head)
    want.load_state_dict({**old, "lm_head.weight": old["transformer.wte.weight"]})
    assert torch.equal(logits(again), logits(want))
    learned = again.transformer.h[1].attn.pde.learned
    assert isinstance(learned, pdes.LearnedPDE)
    first = next(iter(learned.signed))
    logit = old[f"transformer.h.1.attn.pde.learned.{first}_logit"].double()
    share = 1.0 if name == "wave" else 0.5
    found = getattr(learned(), first).detach().flatten().double()
    torch.testing.assert_close(found, share * logit.sigmoid() * (1 - 1e-6), rtol=1e-6, atol=1e-7)
    again.save_pretrained(tmp_path / "new")
    anew = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert torch.equal(logits(anew), logits(again))


# peft


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def adapted(peft, model, **more):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], **more))


@torch.no_grad()
def run(model):
    return model(input_ids=IDS).logits


def test_an_adapter_trains_saves_and_loads_coefficients(peft, tmp_path):
    hf.add_pde(build(gpt2, "sdpa").float(), "diffusion", steps=2).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = run(base)
    model = trained(adapted(peft, base, modules_to_save=["pde"]))
    alphas = {r["name"]: r["mean"] for r in coefficients(model)}
    learnt = {n for n, alpha in alphas.items() if alpha > 1e-3}
    assert learnt == {n for n in alphas if "modules_to_save.default" in n}
    assert len(learnt) == 2
    groups = hf.parameter_groups(model, 1e-3, coefficient_lr=1e-2)
    assert [len(g["params"]) for g in groups if g["lr"] == 1e-2] == [2]
    after = run(model)
    with model.disable_adapter():
        torch.testing.assert_close(run(model), before)
    model.save_pretrained(tmp_path / "adapter")
    load = transformers.AutoModelForCausalLM.from_pretrained
    for again in (
        peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter"),
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        load(tmp_path / "adapter"),
    ):
        assert torch.equal(run(again.eval()), after)
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    merged = again.eval().merge_and_unload()
    torch.testing.assert_close(run(merged), after, rtol=1e-4, atol=1e-4)  # the weights are sums now
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(run(load(tmp_path / "merged")), run(merged))
    hf.add_pde(merged, "wave")  # it has no adapter any more


def test_an_adapter_without_a_place_for_its_coefficients(peft, tmp_path):
    model = adapted(peft, hf.add_pde(build(gpt2, "sdpa"), "diffusion"), modules_to_save=["pde"])
    trained(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no PDE there: call add_pde on the model"):
        peft.PeftModel.from_pretrained(build(gpt2, "sdpa"), tmp_path)
    again = peft.PeftModel.from_pretrained(hf.add_pde(build(gpt2, "sdpa"), "diffusion"), tmp_path)
    assert torch.equal(run(again.eval()), run(model))


def test_an_adapter_that_would_freeze_coefficients_says_so(peft):
    model = adapted(peft, hf.add_pde(build(gpt2, "sdpa"), "diffusion"))
    run(model.eval())
    with pytest.raises(
        ValueError, match=r"has frozen the coefficients .* pass modules_to_save=\[\"pde\"\]"
    ):
        trained(model)
    config = peft.LoraConfig(r=2, target_modules=["c_fc"])
    model = peft.get_peft_model(hf.add_pde(build(gpt2, "sdpa"), "diffusion"), config)
    with pytest.warns(UserWarning, match=r"are frozen. If this model has an adapter"):
        trained(model, 1)
    kept = adapted(peft, hf.add_pde(build(gpt2, "sdpa"), "diffusion"), modules_to_save=["pde"])
    for name, parameter in kept.named_parameters():
        parameter.requires_grad_("lora_" in name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(kept)


def test_a_pde_is_not_added_to_an_adapter(peft):
    model = adapted(peft, build(gpt2, "sdpa"))
    for part in (model, model.base_model, model.base_model.model):
        with pytest.raises(
            ValueError, match=r"call add_pde before get_peft_model, and pass modules_to_save"
        ):
            hf.add_pde(part, "diffusion")


# Trainer and Accelerate


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"input_ids": IDS[i % 2], "labels": IDS[i % 2]}


class PDETrainer(transformers.Trainer):
    """As in docs/how-to/hugging-face.md."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            groups = hf.parameter_groups(
                self.model if model is None else model,
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                coefficient_lr=1e-2,
            )
            self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer


@pytest.mark.slow
def test_trainer_trains_and_loads_the_best_coefficients(tmp_path):
    pytest.importorskip("accelerate")
    model = hf.add_pde(build(gpt2, "sdpa").float(), "diffusion")
    arguments = transformers.TrainingArguments(
        tmp_path, num_train_epochs=3, per_device_train_batch_size=2, eval_strategy="epoch", weight_decay=0.1,
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=1e-5,
        greater_is_better=False, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = PDETrainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert not best.endswith("checkpoint-12")  # the last
    model = trainer.model.eval().cpu()
    assert all(row["mean"] > 1e-3 for row in coefficients(model))
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert torch.equal(logits(load(best)), logits(model))
    last = load(tmp_path / "checkpoint-12")
    assert not torch.equal(logits(last), logits(model))
    trainer.save_model(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))
    resumed = PDETrainer(
        load(tmp_path / "checkpoint-8"), arguments, train_dataset=Rows(), eval_dataset=Rows()
    )
    resumed.args.load_best_model_at_end = False
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert torch.equal(logits(resumed.model.eval().cpu()), logits(last))


@pytest.mark.slow
def test_accelerate_saves_and_loads_the_state(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = hf.add_pde(build(gpt2, "sdpa").float(), "advection_diffusion", per_head=True)
    optimiser = torch.optim.AdamW(hf.parameter_groups(model, 1e-3, coefficient_lr=1e-2))
    model, optimiser = accelerator.prepare(model, optimiser)
    for _ in range(5):
        optimiser.zero_grad()
        accelerator.backward(model(IDS, labels=IDS).loss)
        optimiser.step()
    want = logits(model.eval())
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    accelerator.load_state(tmp_path)
    assert torch.equal(logits(model), want)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from attractor.attention import coefficients
from attractor.integrations import transformers as hf

torch.set_num_threads(1)
hf.register()
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
model = AutoModelForCausalLM.from_pretrained(folder + "/base").train()
for block in model.transformer.h:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimiser = torch.optim.AdamW(hf.parameter_groups(model, 1e-3, coefficient_lr=1e-2))
ids = torch.load(folder + "/ids.pt")
for _ in range(3):
    optimiser.zero_grad()
    model(ids[rank:rank + 1], labels=ids[rank:rank + 1]).loss.backward()
    optimiser.step()
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=whole)
logits = model.eval()(ids).logits.detach()
model.reshard()
if rank == 0:
    copied = AutoModelForCausalLM.from_pretrained(folder + "/base")
    copied.load_state_dict(state)
    assert torch.equal(copied(ids).logits, logits), "a model on one process"
    copied.save_pretrained(folder + "/trained")
    again = AutoModelForCausalLM.from_pretrained(folder + "/trained")
    assert torch.equal(again(ids).logits, logits), "saved and loaded"
    assert all(row["mean"] > 1e-3 for row in coefficients(again)), coefficients(again)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.1)
set_model_state_dict(model, state if rank == 0 else {}, options=StateDictOptions(
    full_state_dict=True, broadcast_from_rank0=True))
assert torch.equal(model(ids).logits, logits), "loaded in shards"
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_in_two_processes(tmp_path):
    """FSDP2 over gloo: trained in shards, saved whole, and loaded by both."""
    hf.add_pde(build(gpt2, "sdpa").float(), "diffusion", steps=2, per_head=True).save_pretrained(
        tmp_path / "base"
    )
    torch.save(IDS, tmp_path / "ids.pt")
    env = {**os.environ, "PYTHONPATH": str(Path(hf.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(tmp_path)],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]


def test_ordinary_models_are_as_before(tmp_path):
    """The hooks change nothing for models without a PDE."""
    for name, make in DECODERS.items():
        model = build(make, "sdpa")
        model.save_pretrained(tmp_path / name)
        again, info = type(model).from_pretrained(tmp_path / name, output_loading_info=True)
        assert torch.equal(logits(again), logits(model))
        assert not info["missing_keys"]
        assert not any(isinstance(m, nn.Module) and hasattr(m, "pde") for m in again.modules())
