"""Proximal policy optimisation with transformers' Trainer.

A rollout samples one completion for each prompt. Each token's reward is the negative divergence from the reference
policy, the last one's also the score of the completion (Stiennon et al. 2020, arXiv:2009.01325; Ouyang et al. 2022,
arXiv:2203.02155). Advantages (Schulman et al. 2016, arXiv:1506.02438) weigh the clipped objective (Schulman et al.
2017, arXiv:1707.06347), which a few updates on the same rollout maximise.

Values come from a linear layer over the policy's own last hidden states, not from a second model: they cost no pass of
their own, and no weights that an adapter was chosen to save. The layer starts at zero, so the first advantages are made
of rewards alone, and the value loss moves the shared layers only as the head learns.

The reference is the policy with the trainable weights that it came with. A fresh adapter is measured against its base
so, a trained one against itself as it was, and a model without an adapter against itself; only the weights that are
trained are kept twice. Both are the same forward pass with other weights: before the first update they agree exactly.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

from ...modeling.moe import AnyformerRouter
from ..errors import UserError
from ..ppo_config import PPOConfig
from ..rewards import checked_scores
from ..routers import have_losses, move_router_biases, router_logits_of
from .functions import (
    AdaptiveKL,
    clipped_policy_loss,
    clipped_value_loss,
    completion_mask,
    gae,
    kl_penalty,
    padded,
    whiten,
)

# Called as TRL calls a reward: (prompts, texts, completion_ids=..., **columns) -> one number for each text.
RewardFunction = Callable[..., list[float]]
VALUE_HEAD = "value_head.safetensors"
STATE = "ppo_state.json"


@dataclass
class Rollout:
    """Completions and what is known of them: P prompt tokens, left-padded, then C of the completion, right-padded.

    Attributes:
        input_ids, attention_mask: [rows, P + C].
        mask: [rows, C], True up to and including the first stop token.
        logps, values: [rows, C], of each sampled token and of the state before it, under the policy that sampled.
        advantages, returns: [rows, C].
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    mask: torch.Tensor
    logps: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def __getitem__(self, rows: torch.Tensor) -> "Rollout":
        return Rollout(*(getattr(self, field.name)[rows] for field in fields(self)))


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The collator: rows as columns, nothing padded."""
    return {name: [row[name] for row in rows] for name in rows[0]}


class PPOTrainer(Trainer):
    """Trains a policy on the rewards of its own completions; see the module and `PPOConfig`.

    Checkpoints, resuming, logs, callbacks, schedules and clipping are the base class's. Beside a checkpoint's weights
    stand `value_head.safetensors` and `ppo_state.json`. To resume, give the model that the first run began with: the
    reference is made from it. Dropout stays off throughout, so that ratios measure updates and not noise.

    A mixture of experts keeps its router losses, taken over each pass of an update and weighed by its share of the real
    tokens, and its routers' biases move after each update.

    Each step logs `reward` (mean score), `kl` (summed over a completion's tokens, mean over completions),
    `kl_per_token`, `entropy`, `completion_length`, `ended` (share with a stop token) and `beta`, and as means over the
    updates `policy_loss`, `value_loss`, `clip_fraction` and `ratio`, of experts also `router_loss`; of several rewards
    each one's mean as `reward/NAME`.

    Args:
        model: an `AnyformerForCausalLM`, or a `PeftModel` around one.
        processing_class: the tokenizer.
        train_dataset: rows with `prompt_ids`, the chat template applied; all other columns go to the rewards, `prompt`
            as their first argument.
        reward: a `recipes.rewards.Reward` or a function of that signature; several are added up. Functions get the ids
            of each completion without padding too, a stop token included.

    Raises:
        UserError: settings under which this trainer does not work.
    """

    args: PPOConfig
    model: Any
    optimizer: Any
    processing_class: Any

    def __init__(
        self,
        model: Any,
        args: PPOConfig,
        processing_class: Any,
        train_dataset: Any,
        reward: RewardFunction | list[RewardFunction],
        callbacks: list[Any] | None = None,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            data_collator=columns_of,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        self.rewards = reward if isinstance(reward, list) else [reward]
        # The model without the wrapper of an adapter; the adapter's layers are in it.
        self.base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body: nn.Module = self.base.base_model
        self._check()
        self.reference = {
            name: parameter.detach().to(args.device, copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if self.base.config.num_experts and self.base.config.router_bias_update_rate:
            # These move too, though no gradient moves them.
            kept = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
            self.reference |= {name: buffer.detach().to(args.device, copy=True) for name, buffer in kept.items()}
            move_router_biases(self, self.base)
        self._routed = have_losses(self.base.config)
        self.value_head = nn.Linear(self.base.config.hidden_size, 1, device=args.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.kl = AdaptiveKL(args.beta, args.kl_target, args.kl_horizon)
        self._columns: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = defaultdict(list)
        set_seed(args.seed, device_specific=True)  # processes sample independently

    def _check(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or self.args.n_gpu > 1:
            raise UserError(
                "ppo keeps the whole model on each device: leave deepspeed and fsdp out, and start one process for "
                "each GPU (accelerate launch) or show one only (CUDA_VISIBLE_DEVICES=0)"
            )
        if self.args.missing_eos_penalty is not None and not self._stop_ids():
            raise UserError(
                "missing_eos_penalty is set, but the model's generation config has no eos_token_id: no completion "
                "could end by itself"
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UserError("no parameter of the model would be trained")

    # Rollouts

    def _set_signature_columns_if_needed(self) -> None:
        # What is left where `remove_unused_columns` is set. (The base class starts with None, hence its type.)
        self._signature_columns = ["prompt_ids"]  # type: ignore[assignment]

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple[list, None]:
        """The batches of one step; their rows make one rollout."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._columns = {name: [value for batch in samples for value in batch[name]] for name in (samples or [{}])[0]}
        return samples, None

    @torch.no_grad()
    def rollout(self, columns: dict[str, list[Any]]) -> Rollout:
        """One completion for each prompt, with its advantages and returns.

        Args:
            columns: `prompt_ids`, and what the rewards take.
        """
        args = self.args
        self.model.eval()
        columns = dict(columns)
        # A slice from None keeps all.
        prompts = [list(ids)[args.max_prompt_length and -args.max_prompt_length :] for ids in columns.pop("prompt_ids")]
        input_ids, attention_mask, mask, ended = self._sample(prompts)
        scores = self._scores(prompts, input_ids[:, -mask.shape[1] :], mask, columns)
        if args.missing_eos_penalty is not None:
            scores = scores - args.missing_eos_penalty * ~ended

        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        for rows in (rows for mini_batch in self._mini_batches(torch.arange(len(prompts))) for rows in mini_batch):
            batch = input_ids[rows], attention_mask[rows], mask.shape[1]
            logps, values, logits = self.score_tokens(self.model, *batch)
            parts["logps"].append(logps)
            parts["values"].append(values)
            parts["entropy"].append(logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1))
            parts["ref_logps"].append(self.score_tokens(self._reference_policy, *batch)[0])
        logps, values, entropy, ref_logps = (torch.cat(tensors) for tensors in parts.values())

        kl = kl_penalty(logps, ref_logps, args.kl_estimator).masked_fill(~mask, 0)
        rewards = -self.kl.beta * kl
        rewards[torch.arange(len(rewards)), mask.sum(-1) - 1] += scores
        if args.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False, total=self._total)
        advantages, returns = gae(rewards, values, mask, args.gamma, args.lam)
        if args.whiten_advantages:
            advantages = whiten(advantages, mask, total=self._total)
        self._finish_rollout(scores, kl, entropy, mask, ended)
        return Rollout(input_ids, attention_mask, mask, logps, values, advantages, returns)

    def _sample(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids and attention mask [rows, P + C], mask [rows, C] of the completions, and which of them ended."""
        args, stops = self.args, self._stop_ids()
        if not all(prompts):
            raise UserError("train_dataset: a row has empty prompt_ids; a completion needs a token to follow")
        pad = self.processing_class.pad_token_id
        prompt_ids, prompt_mask = padded(prompts, pad or 0, "left", args.device)
        width, limit = prompt_ids.shape[1], self.base.config.max_position_embeddings
        if width + args.max_completion_length > limit:
            raise UserError(
                f"max_prompt_length: a prompt of {width} tokens and max_completion_length {args.max_completion_length} "
                f"exceed the {limit} positions of the model; at most {limit - args.max_completion_length} would fit"
            )
        sampling = GenerationConfig(
            do_sample=True,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=0,
            max_new_tokens=args.max_completion_length,
            eos_token_id=stops or None,
            pad_token_id=pad or 0,
            use_cache=True,
        )
        # What a call leaves open comes from the model's own generation config: penalties and limits, which the
        # log-probabilities would not know of.
        own, self.base.generation_config = self.base.generation_config, sampling
        try:
            input_ids = self.model.generate(
                input_ids=prompt_ids, attention_mask=prompt_mask, generation_config=sampling
            )
        finally:
            self.base.generation_config = own
        mask = completion_mask(input_ids[:, width:], stops)
        ended = torch.isin(input_ids[:, width:], input_ids.new_tensor(stops)).any(-1)
        return input_ids, torch.cat([prompt_mask, mask.long()], dim=1), mask, ended

    def _stop_ids(self) -> list[int]:
        stops = self.base.generation_config.eos_token_id
        return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)

    def _scores(
        self, prompts: list[list[int]], tokens: torch.Tensor, mask: torch.Tensor, columns: dict[str, list[Any]]
    ) -> torch.Tensor:
        """The sum of all rewards for each completion, [rows]."""
        completions = [row[kept].tolist() for row, kept in zip(tokens, mask, strict=True)]
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        given = {"completion_ids": completions} | columns
        shown = given.pop("prompt", prompts)
        names = [getattr(reward, "__name__", type(reward).__name__) for reward in self.rewards]
        each = [
            checked_scores(name, reward(shown, texts, **given), texts)
            for name, reward in zip(names, self.rewards, strict=True)
        ]
        scores = torch.tensor(each, device=mask.device)
        if len(names) > 1:
            self._record({f"reward/{name}": self._mean(values) for name, values in zip(names, scores, strict=True)})
        return scores.sum(0)

    def score_tokens(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities and values [rows, width] of the last `width` tokens, and the logits they come from.

        Args:
            model: called as the policy is.
            input_ids, attention_mask: [rows, length]; padding may stand on both sides.

        Returns:
            Logits are [rows, width, vocab_size], over the temperature.
        """
        states: list[torch.Tensor] = []
        hook = self.body.register_forward_hook(lambda module, given, output: states.append(output[0]))
        try:
            logits = model(
                input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=width + 1, use_cache=False
            ).logits
        finally:
            hook.remove()
        # A token is predicted, and the state before it valued, at the position before it.
        logits = logits[:, :-1].float() / self.args.temperature
        values = self.value_head(states[0][:, -width - 1 : -1].float()).squeeze(-1)
        chosen = logits.gather(-1, input_ids[:, -width:, None]).squeeze(-1)
        return chosen - logits.logsumexp(-1), values, logits

    def _reference_policy(self, **inputs: Any) -> Any:
        return torch.func.functional_call(self.model, self.reference, (), inputs)

    def _finish_rollout(
        self, scores: torch.Tensor, kl: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor, ended: torch.Tensor
    ) -> None:
        """Log a rollout and steer beta for the next one."""
        divergence = self._mean(kl.sum(-1))
        self._record(
            {
                "reward": self._mean(scores),
                "kl": divergence,
                "kl_per_token": self._mean(kl[mask]),
                "entropy": self._mean(entropy[mask]),
                "completion_length": self._mean(mask.sum(-1)),
                "ended": self._mean(ended),
                "beta": self.kl.beta,
            }
        )
        self.kl.update(divergence, int(self._total(torch.tensor(len(mask), device=mask.device))))

    def _total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return self.accelerator.reduce(value, "sum")

    def _mean(self, values: torch.Tensor) -> float:
        """The mean over all processes, weighed by how many values each has."""
        return (
            self._total(values.float().sum()) / self._total(torch.tensor(values.numel(), device=values.device))
        ).item()

    # Updates

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The whole of a step at its last batch; the batches before it only wait.

        Returns:
            The mean loss of the updates, of which the trainer's loop still has to apply the last.
        """
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        rollout = self.rollout(self._columns)
        self.state.num_input_tokens_seen += int(self._total(rollout.attention_mask.sum()))
        _train_without_dropout(model)
        self.optimizer.train()
        order, mini_batches = torch.arange(len(rollout.mask)), []
        for _ in range(self.args.num_ppo_epochs):
            # The first pass takes the rows as they were scored, so that its ratios are 1 to the last bit.
            mini_batches += self._mini_batches(order)
            order = torch.randperm(len(order))
        statistics = []
        for number, mini_batch in enumerate(mini_batches):
            if number:
                self._optimizer_step(model)
            self.optimizer.zero_grad()
            statistics.append(self._backward(model, rollout, mini_batch))
        means: Any = self.accelerator.reduce(torch.stack(statistics).mean(0), "mean")
        names = ("policy_loss", "value_loss", "clip_fraction", "ratio", "router_loss")
        said = dict(zip(names, means.tolist(), strict=True))
        self._record(said if self._routed else {n: value for n, value in said.items() if n != "router_loss"})
        return means[0] + self.args.vf_coef * means[1] + means[4]

    def _mini_batches(self, order: torch.Tensor) -> list[list[torch.Tensor]]:
        """Row numbers of each update, and in it of each pass."""
        parts = [part for part in order.tensor_split(self.args.num_mini_batches) if len(part)]
        return [list(part.split(self._train_batch_size)) for part in parts]

    def _backward(self, model: nn.Module, rollout: Rollout, mini_batch: list[torch.Tensor]) -> torch.Tensor:
        """Gradients of one mini-batch.

        Returns:
            Policy loss, value loss, clipped share, mean ratio and router loss, [5].

        Raises:
            UserError: the loss is not finite.
        """
        args, total = self.args, torch.zeros(5, device=self.args.device)
        # The same divisor in each pass and process, which average their gradients.
        drawn = torch.cat(mini_batch)
        tokens = self._total(rollout.mask[drawn].sum()) / self.accelerator.num_processes
        read = self._total(rollout.attention_mask[drawn].sum()) / self.accelerator.num_processes
        for number, rows in enumerate(mini_batch, 1):
            part = rollout[rows]
            with nullcontext() if number == len(mini_batch) else self.accelerator.no_sync(model):
                with self.compute_loss_context_manager():
                    batch = part.input_ids, part.attention_mask, part.mask.shape[1]
                    with router_logits_of(self.base) if self._routed else nullcontext() as routed:
                        logps, values, _ = self.score_tokens(model, *batch)
                    policy_loss, clipped = clipped_policy_loss(
                        logps, part.logps, part.advantages, part.mask, args.cliprange, tokens
                    )
                    value_loss = clipped_value_loss(
                        values, part.values, part.returns, part.mask, args.cliprange_value, tokens
                    )
                    loss = policy_loss + args.vf_coef * value_loss
                    router_loss = torch.zeros_like(loss)
                    if routed:
                        added = self.base.router_losses(routed[-1], [part.attention_mask])[0]
                        router_loss = added * (part.attention_mask.sum() / read)
                    loss = loss + router_loss
                if not loss.isfinite():
                    raise UserError(
                        f"step {self.state.global_step + 1}: the loss is {loss.item()}: training has diverged. Lower "
                        "learning_rate or cliprange, or raise beta"
                    )
                self.accelerator.backward(loss)
            ratio = (logps.detach() - part.logps)[part.mask].exp().sum() / tokens
            total += torch.stack([policy_loss.detach(), value_loss.detach(), clipped, ratio, router_loss.detach()])
        for parameter in self.value_head.parameters():
            parameter.grad = self.accelerator.reduce(parameter.grad, "mean")
        return total

    def _optimizer_step(self, model: nn.Module) -> None:
        if self.args.max_grad_norm > 0:
            self._clip_grad_norm(model)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The base class's, or the one that is there, which trains the value head too, without weight decay."""
        optimizer = super().create_optimizer(model)
        head = list(self.value_head.parameters())
        if not any(parameter is head[0] for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.add_param_group({"params": head, "weight_decay": 0.0})
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        parameters = [*model.parameters(), *self.value_head.parameters()]
        return self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)

    # Logs and checkpoints

    def _record(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics[name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the base class, with the means since the last time."""
        logs |= {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the base class would count a forward pass over the batch, which holds prompts."""
        return 0

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)  # type: ignore[arg-type]
            save_file(self.value_head.state_dict(), folder / VALUE_HEAD)
            (folder / STATE).write_text(json.dumps({"beta": self.kl.beta}), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        for name in (VALUE_HEAD, STATE):
            if not (folder / name).is_file():
                raise UserError(f"{folder} has no {name}: it is no checkpoint of ppo")
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.value_head.load_state_dict(load_file(folder / VALUE_HEAD))
        self.kl.beta = json.loads((folder / STATE).read_text(encoding="utf-8"))["beta"]


def _train_without_dropout(model: nn.Module) -> None:
    """Evaluation mode, which drops nothing, but training mode where activations are recomputed, or the load of experts
    is counted, only in that."""
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer | AnyformerRouter):
            module.training = True
