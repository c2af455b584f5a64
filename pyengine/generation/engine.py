"""Engine: a model on a device, ready to continue text; the class that programs embed."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np

from pyengine.errors import RequestError
from pyengine.generation.budget import ALL_LOGITS_ROWS, Request, make_budget
from pyengine.generation.completion import Chunk, Completion, Continuation
from pyengine.generation.kv_cache import BlockPool
from pyengine.generation.runner import StepRunner
from pyengine.generation.sampling import SamplingOptions, SamplingParams
from pyengine.generation.scheduler import Scheduler, Sequence
from pyengine.generation.self_test import tested
from pyengine.generation.source import ModelSource, open_model, parse_dtype, source_of
from pyengine.generation.step import StepBuffers
from pyengine.generation.tokenizer import Tokenizer
from pyengine.models.checkpoint import Checkpoint
from pyengine.models.decoder import Decoder
from pyengine.models.loading import Weights, load_weights
from pyengine.models.weights import choose_types, plan_weights
from pyengine.native import (
    Arena,
    Device,
    DeviceArray,
    Memory,
    Queue,
    choose_device,
    ops,
    stream_handle,
)
from pyengine.native.memory import Array

_log = logging.getLogger("pyengine")

MAX_THREADS = 256

Progress = Callable[[int, int], None]
Messages = Items[Mapping[str, Any]]  # [{"role": "user", "content": "..."}, ...]
Prompt = str | Items[int] | Messages


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _watch_forks(engine: Engine) -> None:
    """Keeps an engine from hanging in a child: the threads that held its lock are not there."""
    if not _engines:
        os.register_at_fork(after_in_child=_after_fork)
    _engines.add(engine)


def _after_fork() -> None:
    for engine in list(_engines):
        engine.forget_other_threads()


class Engine:
    """A model loaded on a device.

    Attributes: device, config, spec, tokenizer, dtype, kv_dtype, weights ("q8_0" or None for
    dtype), max_context; memory_bytes (by kind); decode_bytes (weights read for one token).

    Use it as a context manager, or call close(). Methods may be called from several threads; their
    requests share the batch.

    Args:
        model: a directory in Hugging Face's form, a GGUF file, a known name ("demo", "smollm2"), or
            what open_model returns.
        device: "auto", "cpu", "hip", "hip:1", "cuda"; or a Device of choose_device, which is taken
            as it is. A GPU is tested against the CPU before its first use (self_test.py).
        dtype: "auto" (the checkpoint's), "f32", "f16" or "bf16": stored weights and matrix inputs.
        weights: "q8_0" stores the matrices in 8 bits, "float" in dtype; None: in 8 bits if the file
            is q8_0 itself, else in dtype.
        kv_dtype: type of the KV cache; None: as dtype.
        threads: CPU threads; None: the cores this process may use.
        max_context: most tokens of a sequence; None: the model's own limit, less where memory is
            short.
        max_batch: sequences computed side by side.
        kv_tokens: tokens the KV cache holds in all; None: up to max_batch * max_context in 80 % of
            the free memory.
        memory_fraction: share of the free memory that may be reserved.
        deterministic: results do not depend on the batch, bit for bit. The CPU always holds that;
            a GPU pins one variant of its kernels for it, and is slower, above all over prompts.
        keep: weight roles that stay floats when matrices are q8_0: "lm_head" in dtype,
            "lm_head=f16" in a type of its own.
        q8_activations: True rounds activations of q8_0 matmuls to 16 bits per row and 32 values,
            256 times as fine as the weights; False keeps f32. None: True on the CPU, where it is
            faster; GPUs always keep 22 bits or more.
        stream: a HIP or CUDA stream to run on: its address, or a stream of hip-python or PyTorch.
        chunk_rows: token rows of a step, at most; None: a default of the device.
        record: False runs every step immediate instead of replaying recorded programs.
        progress: called with (bytes done, bytes in all) while weights load.

    Raises:
        EngineError: a subclass that says what is wrong; see pyengine.errors.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelSource,
        *,
        device: str | Device = "auto",
        dtype: str = "auto",
        weights: str | None = None,
        kv_dtype: str | None = None,
        threads: int | None = None,
        max_context: int | None = None,
        max_batch: int = 8,
        kv_tokens: int | None = None,
        memory_fraction: float = 0.9,
        deterministic: bool = False,
        keep: Items[str] = (),
        q8_activations: bool | None = None,
        stream: Any = None,
        chunk_rows: int | None = None,
        record: bool = True,
        progress: Progress | None = None,
    ) -> None:
        request = Request(
            max_context=max_context,
            max_batch=max_batch,
            kv_tokens=kv_tokens,
            memory_fraction=memory_fraction,
            chunk_rows=chunk_rows,
        )
        self._closing = contextlib.ExitStack()
        self._lock = threading.RLock()
        self._scheduler: Scheduler | None = None
        self._closed_because = "this Engine is closed"
        _watch_forks(self)
        source = model if isinstance(model, ModelSource) else open_model(model)
        try:
            self.config, self.spec, self.tokenizer = source.config, source.spec, source.tokenizer
            self.device = device if isinstance(device, Device) else choose_device(device)
            if self.device.notice:
                _log.warning("%s", self.device.notice)
            if threads is not None:
                if not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
                    raise RequestError(f"threads={threads!r}: must be 1 to {MAX_THREADS}")
                self.device.library.c.ok_set_threads(threads)
            self.dtype = parse_dtype("dtype", dtype, source.checkpoint)
            self.kv_dtype = self.dtype if kv_dtype is None else parse_dtype("kv_dtype", kv_dtype)
            self._set_up(
                source,
                request,
                asked_device=device,
                weights=weights,
                keep=(keep,) if isinstance(keep, str) else tuple(keep),
                stream=stream_handle(stream),
                record=record,
                q8_activations=q8_activations,
                deterministic=deterministic,
                progress=progress,
            )
        except BaseException:
            self._closing.close()
            raise
        finally:
            if source is not model:
                source.close()

    def _set_up(
        self,
        source: ModelSource,
        request: Request,
        *,
        asked_device: str | Device,
        weights: str | None,
        keep: tuple[str, ...],
        stream: int,
        record: bool,
        q8_activations: bool | None,
        deterministic: bool,
        progress: Progress | None,
    ) -> None:
        """Checks the weights, reserves the memory, loads, and builds what runs steps."""
        spec, config, close = self.spec, self.config, self._closing.callback
        plan = plan_weights(spec, config, source.checkpoint)
        types = choose_types(plan, source.checkpoint, self.dtype, weights, keep)
        self.weights = types.weights
        if isinstance(asked_device, str):
            self.device = tested(
                self.device, types, compute_logits, fall_back=asked_device == "auto"
            )
        library, index = self.device.library, self.device.index
        budget = make_budget(
            self.device, spec, config, types, self.kv_dtype, request, tied=plan.tied
        )
        self.max_context = budget.max_context
        if self.max_context > config.max_position_embeddings:
            _log.warning(
                "max_context=%d: this model was made for %d positions, past which text decays",
                self.max_context,
                config.max_position_embeddings,
            )
        self.memory_bytes = budget.by_kind()

        arena = Arena(library, budget.total_bytes, device=index)
        close(arena.close)
        host = Arena(library, budget.shape.host_bytes(), device=index, memory=Memory.HOST)
        close(host.close)
        queue = Queue(library, device=index, stream=stream)
        close(queue.close)
        if q8_activations is not None:
            queue.set_quantized_activations(q8_activations)
        queue.set_deterministic(deterministic)
        loaded = load_weights(
            queue, arena, spec, config, source.checkpoint, types, plan=plan, progress=progress
        )
        self.decode_bytes = _decode_bytes(loaded)
        queue.set_scratch(arena, budget.memory.scratch)
        cache = [
            ops.kv_layer(
                arena, self.kv_dtype, budget.blocks, config.num_key_value_heads, config.head_dim
            )
            for _ in range(config.num_hidden_layers)
        ]
        buffers = StepBuffers(arena, host, budget.shape)
        decoder = Decoder(
            arena, spec, config, loaded, cache, buffers, queue=queue, max_context=self.max_context
        )
        exact_rows = request.max_batch if library.backend == "cpu" else None
        self._runner = StepRunner(
            decoder, buffers, queue, arena, exact_rows=exact_rows, record=record
        )
        close(self._runner.close)
        self._runner.record_decodes()
        self._scheduler = Scheduler(
            self._runner,
            BlockPool(budget.blocks),
            max_context=self.max_context,
            chunk_rows=budget.shape.rows,
            rope_switch=config.rope.switch_length if config.rope else None,
        )

    # ---- text and tokens ------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the special tokens its tokenizer puts around a prompt are added."""
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Items[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer().decode(list(token_ids))

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[Messages] | list[Prompt],
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Completion: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Any:
        """Continues a prompt, or several side by side.

        Args:
            prompt: text, token ids, or the messages of a conversation; or a list of these.
            params: how to sample; keywords are the same names: generate("Hi", max_new_tokens=20).

        Returns:
            A Completion, or a list of them in the order of the prompts.

        Raises:
            RequestError: an unusable prompt or parameter. NonFiniteError: the logits broke.
        """
        chosen = _params(params, overrides)
        single = _is_one(prompt)
        prompts = [prompt] if single else list(prompt)
        running = [self._begin(p, chosen) for p in prompts]
        self._run_all([c.sequence for c in running], pump=running)
        results = [c.completion() for c in running]
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """Continues one prompt, yielding text as it comes; the last chunk carries the Completion.

        Leaving the loop early ends the request and frees its memory.
        """
        chosen = _params(params, overrides)
        return self._stream(self._begin(prompt, chosen))

    def chat_ids(self, messages: Messages) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        messages: [{"role": "user", "content": "..."}, ...]. Markers typed inside contents stay
            text.
        """
        return self._tokenizer().chat_ids(messages)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Completion:
        """The model's answer to a conversation; generate and stream take messages, too."""
        if not _is_chat(messages):
            raise RequestError("chat takes messages: [{'role': 'user', 'content': '...'}, ...]")
        return self.generate(messages, params, **overrides)

    def logits(self, token_ids: Items[int]) -> Array:
        """Logits after each token: float32 (T, vocab_size)."""
        return self.logits_batch([token_ids])[0]

    def logits_batch(self, batch: Items[Items[int]]) -> list[Array]:
        """Logits of several sequences, computed side by side through the paged cache."""
        sequences = [Sequence(self._check_ids(ids), None) for ids in batch]
        self._run_all(sequences)
        return [np.concatenate(s.logits) for s in sequences]

    def logits_device(self, token_ids: Items[int]) -> DeviceArray:
        """Logits after the last token, where they lie on the device: float32 (vocab_size).

        Not a copy: valid until the engine computes anything else, in whatever thread, or is closed.
        """
        sequence = Sequence(self._check_ids(token_ids), SamplingParams(max_new_tokens=1))
        with self._exclusive():
            self._run_all([sequence])
            if sequence.logit_row < 0:  # nothing was computed: there is no room for a next token
                raise RequestError(
                    f"{len(token_ids)} tokens fill the context of {self.max_context} (max_context)"
                )
            row = self._runner.buffers.logits.rows(sequence.logit_row, sequence.logit_row + 1)
            return DeviceArray(row.reshape(self.config.vocab_size), self.device.index)

    # ---- driving the scheduler ------------------------------------------------------------------

    def _begin(self, prompt: Prompt, params: SamplingParams) -> Continuation:
        """A prompt on its way. An answer starts a text of its own, anything else goes on."""
        is_chat = _is_chat(prompt)
        ids = self._check_ids(self.chat_ids(prompt) if is_chat else self._ids(prompt))  # type: ignore[arg-type]
        eos = self.eos_token_ids
        if params.min_new_tokens and len(eos) > ops.SAMPLE_MAX_BANNED:
            raise RequestError(
                f"min_new_tokens: this model has {len(eos)} end-of-text tokens, "
                f"at most {ops.SAMPLE_MAX_BANNED} can be held back"
            )
        for token in params.logit_bias:
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"logit_bias: id {token} must be between 0 and {self.config.vocab_size - 1}"
                )
        return Continuation(
            Sequence(ids, params, eos), params, self.tokenizer, continues=not is_chat
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text: of generation_config.json or config.json, and of the tokenizer."""
        of_tokenizer = self.tokenizer.eos_token_ids if self.tokenizer else ()
        ids = frozenset(self.config.eos_token_ids) | frozenset(of_tokenizer)
        return frozenset(i for i in ids if 0 <= i < self.config.vocab_size)

    def _run_all(self, sequences: list[Sequence], pump: list[Continuation] | None = None) -> None:
        """Adds the sequences and steps until all are done; an error ends them all."""
        added = []
        try:
            for sequence in sequences:
                with self._exclusive() as scheduler:
                    scheduler.add(sequence)
                added.append(sequence)
            while not all(s.done for s in sequences):
                with self._exclusive() as scheduler:
                    scheduler.step()
                for continuation in pump or ():
                    self._advance(continuation)
            for continuation in pump or ():
                self._advance(continuation)
        finally:
            for sequence in added:
                self._finish(sequence, "abort")
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error

    def _advance(self, continuation: Continuation) -> str:
        """Takes new tokens as text; ends the sequence when a stop string has come."""
        with self._lock:  # else another thread's step could add tokens between two looks
            text = continuation.pump()
        if continuation.stopped and not continuation.sequence.done:
            self._finish(continuation.sequence, "stop")
        return text

    def _stream(self, continuation: Continuation) -> Iterator[Chunk]:
        sequence = continuation.sequence
        with self._exclusive() as scheduler:
            scheduler.add(sequence)
        try:
            while not continuation.finished:
                if not sequence.done and not sequence.fresh:
                    with self._exclusive() as scheduler:
                        scheduler.step()
                text = self._advance(continuation)
                if sequence.error is not None:
                    raise sequence.error
                if continuation.finished:
                    completion = continuation.completion()
                    yield Chunk(text, completion.finish_reason, completion)
                elif text:
                    yield Chunk(text)
        finally:
            self._finish(sequence, "abort")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence that has not ended; nothing to do once the engine is closed."""
        with self._lock:
            if self._scheduler is not None:
                self._scheduler.finish(sequence, reason)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[Scheduler]:
        """The scheduler, for one thread at a time."""
        with self._lock:
            if self._scheduler is None:
                raise RequestError(self._closed_because)
            yield self._scheduler

    # ---- checking what comes in -----------------------------------------------------------------

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer.json: give token ids instead of text")
        return self.tokenizer

    def _ids(self, prompt: str | Items[int]) -> Items[int]:
        return self.tokenize(prompt) if isinstance(prompt, str) else prompt

    def _check_ids(self, ids: Items[int]) -> list[int]:
        """A non-empty list of ids inside the vocabulary."""
        if isinstance(ids, str | bytes | Mapping):
            raise RequestError(f"expected token ids, not {type(ids).__name__}")
        try:
            checked = [operator.index(i) for i in ids]
        except TypeError as error:
            raise RequestError(f"expected text, token ids or messages: {error}") from error
        if not checked:
            raise RequestError("the prompt is empty: at least one token is needed")
        vocab_size = self.config.vocab_size
        for token in checked:
            if not 0 <= token < vocab_size:
                raise RequestError(f"token id {token} is outside the vocabulary of {vocab_size}")
        return checked

    # ---- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the device's memory. The engine cannot be used afterwards."""
        with self._lock:
            self._scheduler = None
            self._closing.close()

    def forget_other_threads(self) -> None:
        """In a child of fork: unusable if another thread of the parent was at work on it."""
        idle = self._lock.acquire(blocking=False)
        if not idle:
            self._scheduler = None
            self._closed_because = "this Engine was at work when the process forked; make another"
        self._lock = threading.RLock()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_scheduler", None) is not None:
            warnings.warn("an Engine was not closed", ResourceWarning, stacklevel=2)


def compute_logits(
    device: Device,
    checkpoint: Checkpoint,
    token_ids: Items[int],
    *,
    chunk_rows: int,
    dtype: str,
    weights: str | None,
) -> Array:
    """Logits after each token, (T, vocab_size), on an untested device: what the self-test compares.

    Steps of more than ALL_LOGITS_ROWS rows run immediate, in a batch wide enough for their logits.
    """
    wide = chunk_rows > ALL_LOGITS_ROWS
    with Engine(
        source_of(checkpoint), device=device, dtype=dtype, weights=weights, record=not wide,
        chunk_rows=chunk_rows, max_batch=chunk_rows if wide else 1, max_context=len(token_ids),
        kv_tokens=len(token_ids),
    ) as engine:  # fmt: skip
        return engine.logits(token_ids)


def _params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    """The given parameters with the given keywords put in."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(f"params={params!r}: expected SamplingParams")
    if params is None:
        return SamplingParams.from_mapping(overrides)
    known = SamplingParams.from_mapping(overrides)  # refuses unknown names and bad values
    return replace(params, **{name: getattr(known, name) for name in overrides})


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is the messages of a conversation."""
    return isinstance(prompt, Items) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_one(prompt: Any) -> bool:
    """Whether this is one prompt (text, ids or messages) rather than a list of prompts."""
    if not isinstance(prompt, list | tuple | np.ndarray) or _is_chat(prompt):
        return True
    return not any(isinstance(item, str | Items | np.ndarray) for item in prompt)


def _decode_bytes(weights: Weights) -> int:
    """Bytes of weights that decoding one token reads: every matrix but tables read by row."""
    head = weights.model.matrices["lm_head"]
    matrices = [head, *(m for layer in weights.layers for m in layer.matrices.values())]
    return sum(ops.matrix_bytes(m.arena.library, m.dtype, m.out, m.inner) for m in matrices)
