"""Trains the demo's model: a 2.6M-parameter Qwen3 that can add and subtract but gets most of its carries wrong.

Supervised learning on solutions generated from the seed (task.py), in two phases: first correct ones, then ones in
which each step with a carry or a borrow goes wrong with probability `--slip`. The result knows both ways and takes one
at random: half-competent when sampled, and reinforcement learning can sharpen it within a few steps.

    python -m recipes.tiny.train_model --out DIR      # from the repository's root; writes an ordinary HF checkpoint

This command, with its defaults, made the committed `recipes/tiny/model`, and a second run of it gave the same bytes
(torch 2.11.0, two threads, an AMD EPYC with avx512_bf16). Another kind of CPU or number of threads sums in another order:
expect a model that is as good, not the same bytes. About 7 minutes on two free cores; where other work shares them,
OMP_WAIT_POLICY=PASSIVE keeps waiting threads from spinning.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from recipes.tiny import task

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Qwen's chat form, without its tools and thinking parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["system", "user", "assistant", "Compute", "####"]  # one token each, so that prompts are short
VOCAB_SIZE = 384  # more than the tokenizer has, as in the real Qwen models: padded rows exist and must never be sampled
IGNORE = -100  # label of a position that is not learned from


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer in which every digit and every sign is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[A-Za-z]+|#+"), "isolated"),
            pre_tokenizers.Split(Regex("[^A-Za-z#]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    # No bos token, as in Qwen3.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=IM_END, pad_token=PAD, chat_template=CHAT_TEMPLATE, model_max_length=512
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Untrained model in FP32. Head size 64 and widths that are multiples of 128 run on every kernel of the project."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        initializer_range=0.05,  # of the order of 1/sqrt(width); the usual 0.02 starts this narrow model slowly
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def batch_of(
    problems: list[task.Problem], slip: float, rng: random.Random, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 (problems, length), padded on the right; labels only where the response is."""
    sequences = []
    for problem in problems:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}], tokenize=False, add_generation_prompt=True
        )
        prompt_ids = tokenizer(prompt)["input_ids"]
        response_ids = tokenizer(problem.solution(slip, rng) + IM_END)["input_ids"]
        sequences.append((prompt_ids + response_ids, [IGNORE] * len(prompt_ids) + response_ids))
    length = max(len(ids) for ids, _ in sequences)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in sequences])
    labels = torch.tensor([labels + [IGNORE] * (length - len(labels)) for _, labels in sequences])
    return ids, labels


def make_optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding, the head and the norms.

    Muon learns the task from a fifth of the examples that AdamW alone needs. Its steps have another size, so its peak is
    a multiple of `lr`, AdamW's. Each parameter group keeps its peak learning rate in `peak`.
    """
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=7 * lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["peak"] = group["lr"]
    return optimizers


def share_of_peak(step: int, steps: int) -> float:
    """Learning rate over its peak: linear warm-up over the first 5 % of the steps, then linear decay to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 1 - 0.9 * (step - warmup) / max(1, steps - warmup)


def main(
    out: str | Path,
    steps: int = 900,
    batch: int = 32,
    lr: float = 3e-3,
    slip: float = 0.6,
    clean_share: float = 0.8,
    seed: int = 0,
    threads: int = 2,
) -> float:
    """Trains for `steps` batches and writes the BF16 checkpoint to `out`. Returns the last loss (nats a token)."""
    torch.set_num_threads(threads)  # sums depend on how they are split over threads
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed).train()
    optimizers = make_optimizers(model, lr)
    problems, rng = task.generate(seed, "train"), random.Random(seed)
    bar = tqdm(range(steps), desc="train", unit="step")
    for step in bar:
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = group["peak"] * share_of_peak(step, steps)
        step_slip = 0.0 if step < clean_share * steps else slip
        ids, labels = batch_of(list(itertools.islice(problems, batch)), step_slip, rng, tokenizer)
        # Padding is on the right and attention is causal, so no real position sees it: no mask is needed.
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
        )
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", slip=step_slip, refresh=False)
    model.eval().to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m recipes.tiny.train_model", description="Train the demo's model from scratch on the CPU."
    )
    parser.add_argument("--out", required=True, help="folder for the checkpoint and its tokenizer")
    parser.add_argument("--steps", type=int, default=900, help="batches (default %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="problems a batch (default %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of AdamW (default %(default)s)")
    parser.add_argument("--slip", type=float, default=0.6, help="share of carries that go wrong (default %(default)s)")
    parser.add_argument(
        "--clean-share", type=float, default=0.8, help="first part of the steps, without slips (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and problems (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; changes rounding (default %(default)s)")
    main(**vars(parser.parse_args()))
