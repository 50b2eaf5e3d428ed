"""The heads: each is a body and one or two layers.

Experts: @use_experts_implementation (the library looks for this word in the file of a class).
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing

from .configuration_anyformer import AnyformerConfig
from .losses import (
    IGNORED,
    Count,
    causal_lm_loss,
    is_plain,
    is_sharded,
    linear_cross_entropy,
    next_tokens,
    problem_type_of,
    recomputed_cross_entropy,
    router_losses,
    sequence_classification_loss,
    supervised_loss,
    token_loss,
)
from .masks import REAL_INDICES, attention_masks, real_indices
from .modeling_anyformer import AnyformerModel, AnyformerPreTrainedModel, one_cache, pool
from .moe import AnyformerRouter
from .norms import build_norm
from .outputs import AnyformerHeadOutput, AnyformerModelOutput
from .paged import PagedGeneration
from .soft_prompts import SoftPromptGeneration


class AnyformerHead(AnyformerPreTrainedModel):
    """A body under a head.

    Args:
        pooled: the head reads the pooler, where the config has one.

    Attributes:
        shapes: the architectures that the head fits.
    """

    shapes: tuple[str, ...] = ("decoder", "encoder", "encoder-decoder")

    def __init__(self, config: AnyformerConfig, pooled: bool = False) -> None:
        if config.architecture not in self.shapes:
            right = [cls.__name__ for cls in HEADS.values() if config.architecture in getattr(cls, "shapes", ())]
            raise ValueError(
                f"{type(self).__name__} needs architecture={' or '.join(map(repr, self.shapes))}, the config says "
                f"{config.architecture!r}; that goes with {', '.join(right)}"
            )
        super().__init__(config)
        self.model = AnyformerModel(config, add_pooling_layer=pooled)

    def _output(self, outputs: AnyformerModelOutput, **fields: Any) -> AnyformerHeadOutput:
        kept = {name: value for name, value in outputs.items() if name not in ("last_hidden_state", "pooler_output")}
        return AnyformerHeadOutput(**fields, **kept)

    def _router_arguments(self, labels: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Ask the body for router logits where they are wanted or a loss needs them."""
        config = self.config
        needed = labels is not None and (config.router_aux_loss_coef or config.router_z_loss_coef)
        if config.num_experts and (needed or config.output_router_logits):
            kwargs.setdefault("output_router_logits", True)
        return kwargs

    def router_losses(self, router_logits: Any, masks: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the routers add to the loss, and their load-balancing loss alone, as `losses.router_losses`.

        Args:
            router_logits: [tokens, experts] of each sparse layer, the encoder's first.
            masks: the attention masks of the encoder and the decoder, of those that there are.
        """
        stacks = [s for s in (self.model.encoder, self.model.layers) if s is not None]
        parts, taken = [], 0
        for stack, mask in zip(stacks, masks, strict=True):
            routers = [m for m in stack.modules() if isinstance(m, AnyformerRouter)]
            logits = router_logits[taken : taken + len(routers)]
            taken += len(routers)
            if not routers:  # an encoder may lack the layers that are sparse in the decoder
                continue
            usable = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
            if usable is not None and usable.numel() != len(logits[0]):
                usable = usable[:, -(len(logits[0]) // len(usable)) :]
            parts.append(router_losses(logits, routers, self.config, usable))
        added, balance = (torch.stack(values).mean() for values in zip(*parts, strict=True))
        return added, balance

    def _add_router_losses(self, loss: Any, outputs: Any, masks: list[Any], items: Any, total: Any) -> Any:
        """The loss with what the routers add, and their load-balancing loss alone.

        Args:
            items: number of targets here; total: of the whole batch, or None.
        """
        config = self.config
        if loss is None or not (config.router_aux_loss_coef or config.router_z_loss_coef):
            return loss, None
        added, balance = self.router_losses(outputs.router_logits, masks)
        # Weighed by this call's share of the whole batch, as the targets are.
        return loss + (added if total is None else added * (items / total)), balance


class LanguageModelHead(AnyformerHead):
    """A head over the vocabulary."""

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: AnyformerConfig, pooled: bool = False) -> None:
        super().__init__(config, pooled)
        self.lm_head_transform = HeadTransform(config) if config.head_transform else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., vocab_size]."""
        return self._scaled(self.lm_head(self._transformed(hidden_states)))

    def _transformed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self.lm_head_transform is None else self.lm_head_transform(hidden_states)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _chunks(self, hidden_states: torch.Tensor) -> bool:
        """Whether a loss of hidden states [..., hidden_size] is computed without the logits of all of them."""
        if not self.training or not 0 < self.config.loss_chunk_size < hidden_states.shape[:-1].numel():
            return False
        parts = [part for part in (self.lm_head_transform, self.lm_head) if part is not None]
        return not is_tracing(hidden_states) and not any(is_sharded(part) for part in parts)

    def _chunked_loss(
        self, hidden_states: torch.Tensor, targets: torch.Tensor, items: Count, ignore_index: int = IGNORED
    ) -> torch.Tensor:
        """`token_loss` of the logits of hidden states [..., hidden_size], `config.loss_chunk_size` tokens at a time."""
        size = self.config.loss_chunk_size

        def total_of(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if is_plain(self.lm_head) and type(self).logits_of is LanguageModelHead.logits_of:
                return linear_cross_entropy(self._transformed(states), targets, self.lm_head, self._scaled, size)
            return recomputed_cross_entropy(states, targets, self.logits_of, size)

        return supervised_loss(hidden_states, targets, total_of, items, ignore_index)

    def _loss_and_logits(self, hidden_states: torch.Tensor, labels: Any, items: Count) -> tuple[Any, Any]:
        """The loss of labels that stand beside the hidden states they belong to, and the logits; None for what is not.

        Args:
            hidden_states: [batch, length, hidden_size]. labels: [batch, length] or None.
            items: number of targets of the whole batch, or None.
        """
        if labels is not None and self._chunks(hidden_states):
            return self._chunked_loss(hidden_states, labels, items), None
        logits = self.logits_of(hidden_states)
        return None if labels is None else token_loss(logits, labels, items), logits


class HeadTransform(nn.Module):
    """norm(act(W x)) before a masked-LM head (BERT, arXiv:1810.04805)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.head_transform_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.norm = build_norm(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(self.dense(hidden_states)))


class GenerationHead(LanguageModelHead, PagedGeneration, SoftPromptGeneration, GenerationMixin):
    """What `generate` needs of a head."""

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As the base class, with the cache under the name that PEFT's prompt learning still reads.

        `inputs_embeds` stands in the signature because `generate` looks for it there.
        """
        mask = kwargs.get("decoder_attention_mask")
        if self.config.is_encoder_decoder and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            # A static cache gets its masks built ahead, in which the padding of a prompt can no longer be counted.
            kwargs["decoder_position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        if inputs_embeds is None and self._frequencies_switch(args[0] if args else kwargs["input_ids"], kwargs):
            # What is cached was rotated by the frequencies for short texts: all is computed anew, once.
            kwargs |= {"cache": None, "next_sequence_length": None}
        inputs = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        if "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    def _frequencies_switch(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether this step is the first beyond the original length of rope_type "longrope"."""
        cache = kwargs.get("cache")
        lengths = self.config.longrope_lengths
        if not lengths or cache is None or self.config.is_encoder_decoder:
            return False
        past, mask, virtual = cache.get_seq_length(), kwargs.get("attention_mask"), self.virtual_tokens()
        if not past:
            return False
        if mask is None:
            mask = torch.ones_like(input_ids)
        before, now = (int(mask[:, :end].sum(-1).max()) + virtual for end in (past - virtual, mask.shape[1]))
        return any(before <= length < now for length in lengths)

    @staticmethod
    def create_masks_for_generate(
        config: AnyformerConfig, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Masks ahead of a compiled step: the library's function does not know every layer type."""
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        masks = attention_masks(config, config.layer_types, inputs_embeds, attention_mask, own)
        counted = real_indices(attention_mask)
        return masks if counted is None else {**masks, REAL_INDICES: counted}

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any):
        given = model_kwargs.get("cache")
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("cache")
        if cache is not given and isinstance(cache, EncoderDecoderCache):
            # The library sizes it by the decoder's windows, which would cut the encoder's keys.
            model_kwargs["cache"] = EncoderDecoderCache(cache.self_attention_cache, DynamicCache())
        return result


class AnyformerForCausalLM(GenerationHead):
    """A decoder that predicts the next token."""

    shapes = ("decoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.loss_function = causal_lm_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            labels: [batch, length], -100 where nothing is to be learned; shifted here.
            logits_to_keep: positions whose logits are wanted: 0 for all, n for the last n, or indices.

        Returns:
            `logits` [batch, kept, vocab_size] (None where the loss is computed in chunks: see
            `AnyformerConfig.loss_chunk_size`), `cache`, and with labels `loss`, divided by `num_items_in_batch`
            where the trainer passes it.
        """
        targets = kwargs.get("shift_labels") if labels is None else labels[:, 1:]
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **self._router_arguments(targets, kwargs),
        )
        kept = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        total = kwargs.get("num_items_in_batch")
        loss = logits = extra = None
        # A loss function that somebody has put in its place wants logits.
        if targets is not None and self._chunks(kept) and self.loss_function is causal_lm_loss:
            pairs = next_tokens(kept, labels, kwargs.get("shift_labels"))
            loss = self._chunked_loss(*pairs, total, kwargs.get("ignore_index", IGNORED))
        else:
            logits = self.logits_of(kept)
            if targets is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if targets is not None:
            items = (targets != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, [attention_mask], items, total)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra)


class AnyformerForConditionalGeneration(GenerationHead):
    """An encoder-decoder that predicts the next token of its decoder."""

    shapes = ("encoder-decoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels one place to the right behind `decoder_start_token_id`; -100 becomes the padding token."""
        return shift_right(labels, self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Any = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            labels: [batch, length] of the decoder, -100 where nothing is to be learned. Without `decoder_input_ids`
                these are the labels shifted right, so that the decoder predicts each label from those before it.

        Returns:
            `logits` [batch, kept, vocab_size], `cache`, and with labels `loss`, as `AnyformerForCausalLM.forward`.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("Pass decoder_input_ids, decoder_inputs_embeds or labels: the decoder has no input")
            decoder_input_ids = shift_right(labels, self.config)
            if decoder_attention_mask is None and self.config.num_experts:
                # Routers would count the padding behind the last label.
                targets = (labels != IGNORED).long()
                decoder_attention_mask = targets.flip(-1).cummax(-1).values.flip(-1)
                if (held := one_cache(cache, past_key_values)) is not None:  # the prefix of prefix tuning
                    seen = int(held.get_seq_length())
                    decoder_attention_mask = nn.functional.pad(decoder_attention_mask, (seen, 0), value=1)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **self._router_arguments(labels, kwargs),
        )
        kept = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        loss, logits = self._loss_and_logits(kept, labels, num_items_in_batch)
        extra = None
        if labels is not None:
            masks, items = [attention_mask, decoder_attention_mask], (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, masks, items, num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra)


class AnyformerForMaskedLM(LanguageModelHead):
    """An encoder that predicts masked tokens."""

    shapes = ("encoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`; `labels` [batch, length] are -100 except at masked tokens.

        Returns:
            `logits` [batch, length, vocab_size], and with labels `loss`, as `AnyformerForCausalLM.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self._router_arguments(labels, kwargs),
        )
        loss, logits = self._loss_and_logits(outputs.last_hidden_state, labels, num_items_in_batch)
        extra = None
        if labels is not None:
            items = (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, [attention_mask], items, num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra)


class AnyformerForPreTraining(LanguageModelHead):
    """BERT's pair of objectives: masked tokens, and whether the second text follows the first (arXiv:1810.04805)."""

    shapes = ("encoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        if not config.pooler:
            raise ValueError("AnyformerForPreTraining reads the pooler: set pooler=True in the config")
        super().__init__(config, pooled=True)
        self.nsp_head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerForMaskedLM.forward`, and:

        Args:
            next_sentence_label: [batch], 0 where the second text follows the first, 1 where it does not.

        Returns:
            `prediction_logits` [batch, length, vocab_size] (as `logits` of `AnyformerForCausalLM.forward`),
            `seq_relationship_logits` [batch, 2], and the sum of the losses whose labels are given.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self._router_arguments(labels, kwargs),
        )
        loss, prediction = self._loss_and_logits(outputs.last_hidden_state, labels, num_items_in_batch)
        relation = self.nsp_head(outputs.pooler_output)
        extra = None
        if labels is not None:
            items = (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, [attention_mask], items, num_items_in_batch)
        if next_sentence_label is not None:
            targets = next_sentence_label.view(-1)
            if num_items_in_batch is None or labels is None:
                follows = token_loss(relation, targets)
            else:
                # A row weighs as its masked tokens do: of an accumulated batch a call knows no other share.
                each = nn.functional.cross_entropy(relation.float(), targets, reduction="none")  # [batch]
                follows = (each * (labels != IGNORED).sum(-1)).sum() / num_items_in_batch
            loss = follows if loss is None else loss + follows
        return self._output(
            outputs, loss=loss, prediction_logits=prediction, seq_relationship_logits=relation, aux_loss=extra
        )


class ClassifierHead(AnyformerHead):
    """A linear layer over hidden states; of an encoder-decoder, those of its decoder reading the text shifted right."""

    def __init__(self, config: AnyformerConfig, pooled: bool = False) -> None:
        super().__init__(config, pooled)
        dropout = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)

    def _run(
        self, input_ids: Any, attention_mask: Any, labels: Any, kwargs: dict[str, Any]
    ) -> tuple[AnyformerModelOutput, list[Any]]:
        """The body's outputs, and the masks that its routers saw."""
        if self.config.is_encoder_decoder and kwargs.get("decoder_input_ids") is None:
            if input_ids is None:
                raise ValueError("a classifier on an encoder-decoder needs input_ids: its decoder reads them too")
            kwargs["decoder_input_ids"] = shift_right(input_ids, self.config, attention_mask)
            kwargs["decoder_attention_mask"] = attention_mask
        kwargs["cache"] = one_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, **self._router_arguments(labels, kwargs)
        )
        both = [attention_mask, kwargs.get("decoder_attention_mask")]
        return outputs, both if self.config.is_encoder_decoder else both[:1]


class AnyformerForSequenceClassification(ClassifierHead):
    """One set of logits for a text: a classifier, or with `num_labels` 1 a reward model."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config, pooled=config.classifier_pooling == "first")
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=config.classifier_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            labels: [batch] classes (several labels: [batch, labels] of 0 and 1; one label: [batch] values).

        Returns:
            `logits` [batch, labels], read at the first or last real token, or their mean, as `classifier_pooling`
            says, on either padding side. Without a mask, the last one is the last that is not `pad_token_id`.
        """
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        outputs, masks = self._run(input_ids, attention_mask, labels, kwargs)
        which, mask = self.config.classifier_pooling, attention_mask
        if which == "last" and mask is None and input_ids is not None and self.config.pad_token_id is not None:
            mask = (input_ids != self.config.pad_token_id).long()
        pooled = outputs.pooler_output if which == "first" else None
        if pooled is None:
            pooled = pool(outputs.last_hidden_state, mask, which)
        logits = self.score(self.dropout(pooled))
        loss = extra = None
        if labels is not None:
            kind = self.config.problem_type or problem_type_of(self.num_labels, labels)
            loss = sequence_classification_loss(logits, labels, kind, num_items_in_batch)
            loss, extra = self._add_router_losses(loss, outputs, masks, labels.numel(), num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra)


class AnyformerForTokenClassification(ClassifierHead):
    """Logits for each token."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`; `labels` [batch, length], -100 for none. `logits` [batch, length, labels]."""
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        outputs, masks = self._run(input_ids, attention_mask, labels, kwargs)
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = extra = None
        if labels is not None:
            loss = token_loss(logits, labels, num_items_in_batch)
            items = (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, masks, items, num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra)


class AnyformerForQuestionAnswering(ClassifierHead):
    """Where an answer starts and ends in the text (BERT, arXiv:1810.04805, sec. 4.2)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            start_positions, end_positions: [batch], first and last token of the answer; outside the text: none.

        Returns:
            `start_logits` and `end_logits` [batch, length], and the mean of both losses.
        """
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        outputs, masks = self._run(input_ids, attention_mask, start_positions, kwargs)
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = extra = None
        if start_positions is not None and end_positions is not None:
            length = start.shape[-1]
            halves = []
            for logits, positions in ((start, start_positions), (end, end_positions)):
                inside = (positions >= 0) & (positions < length)
                halves.append(token_loss(logits, positions.masked_fill(~inside, IGNORED), num_items_in_batch))
            loss = (halves[0] + halves[1]) / 2
            loss, extra = self._add_router_losses(loss, outputs, masks, len(start), num_items_in_batch)
        return self._output(outputs, loss=loss, start_logits=start, end_logits=end, aux_loss=extra)


def shift_right(tokens: torch.Tensor, config: AnyformerConfig, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, length] tokens one place to the right behind the start token; -100 becomes the padding token.

    Args:
        mask: [batch, length]: the start token stands before the first real one, on either padding side.

    Raises:
        ValueError: the config states no start token, or no padding token where one is needed.
    """
    start, pad = config.decoder_start_token_id, config.pad_token_id
    if start is None:
        raise ValueError("config.decoder_start_token_id is not set: the decoder needs a token to start from")
    shifted = tokens.roll(1, dims=-1)
    shifted[:, 0] = start
    if mask is not None:
        first = mask.bool() & ~nn.functional.pad(mask.bool(), (1, 0))[:, :-1]
        shifted = shifted.masked_fill(first, start)
    ignored = shifted == IGNORED
    if pad is None and ignored.any():
        raise ValueError("config.pad_token_id is not set: labels of -100 need a token to stand in for them")
    return shifted if pad is None else shifted.masked_fill(ignored, pad)


HEADS: dict[str, type[AnyformerPreTrainedModel]] = {
    "base": AnyformerModel,
    "causal_lm": AnyformerForCausalLM,
    "seq2seq_lm": AnyformerForConditionalGeneration,
    "masked_lm": AnyformerForMaskedLM,
    "pretraining": AnyformerForPreTraining,
    "sequence_classification": AnyformerForSequenceClassification,
    "token_classification": AnyformerForTokenClassification,
    "question_answering": AnyformerForQuestionAnswering,
}
