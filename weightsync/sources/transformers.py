"""Models of the transformers library: the names, shapes and ties of their own checkpoints.

What a model calls its tensors at run time is not what ``save_pretrained`` writes: names differ,
experts are packed, projections are fused or permuted. The model's own conversion, the one that
``save_pretrained`` runs, says how, so that no architecture is special here.

It is run once on stand-ins without data, which tell what each tensor of the checkpoint is made
of. Most are renamed, or parts of a tensor of the model, and exist in its memory already; only
what really has to be computed becomes a :class:`~weightsync.weight.Weight`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.errors import SourceError
from weightsync.manifest import describe
from weightsync.sources.mapping import identity_of, ties_of
from weightsync.tree import modules_of
from weightsync.weight import Piece, Refusal, Value, Weight, is_collective, read


class Checkpoint:
    """The checkpoint layout of one ``PreTrainedModel``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plan: _Plan | None = None

    def convert(self, values: dict[str, Value]) -> dict[str, Value]:
        """Values under run-time names to values under the checkpoint's names.

        What is only renamed stays the object it is. Parts of a tensor are views that share its
        memory. What must be computed, or is part of a weight, is a weight; those that are made
        together follow each other.

        Raises:
            SourceError: the model's conversion fails, or cannot be followed.
        """
        ignored = getattr(self._model, "_keys_to_ignore_on_save", None) or ()
        values = {name: value for name, value in values.items() if name not in ignored}
        forms = {name: _Form.of(value) for name, value in values.items()}
        tied = [names for names in ties_of(values) if len(names) > 1]
        if self._plan is None or (self._plan.forms, self._plan.tied) != (forms, tied):
            self._plan = _Plan.of(self._model, forms, tied)
        return self._plan.apply(self._model, values)

    def primary(self, names: Sequence[str]) -> str:
        """Which of the names of a tied weight the checkpoint keeps."""
        kept = () if self._plan is None else self._plan.kept
        return next((name for name in names if name in kept), names[0])

    def extras(self, dtype: torch.dtype | None) -> dict[str, bytes]:
        """What ``save_pretrained`` writes beside the weights: how to make the model of them.

        Args:
            dtype: that the weights are cast to; None for the model's own.

        Raises:
            SourceError: the model's configuration cannot be written.
        """
        model = self._model
        try:
            config = deepcopy(model.config)
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            setattr(
                config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype or model.dtype
            )
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # packed weights are sent dequantised
            files = {"config.json": config.to_json_string()}
            generation = getattr(model, "generation_config", None)
            if generation is not None:
                files["generation_config.json"] = generation.to_json_string()
        except Exception as error:
            raise _failed(model, error, "its configuration as JSON") from error
        return {name: text.encode() for name, text in files.items()}

    def keeps(self, name: str, dtype: torch.dtype | None) -> bool:
        """Whether the model wants a tensor (by its checkpoint name) to stay float32."""
        origin = None if self._plan is None else self._plan.origins.get(name)
        if origin is None or origin.dtype != torch.float32:
            return False
        modules = list(getattr(self._model, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            modules += getattr(self._model, "_keep_in_fp32_modules", None) or ()
        patterns = [_module_pattern(module) for module in modules]
        return any(pattern.search(own) for own in origin.names for pattern in patterns)


def checkpoint_of(module: nn.Module) -> Checkpoint | None:
    """The layout of a transformers model; None for any other module."""
    # Whoever has such a model has imported transformers; nobody else pays for importing it.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return None
    return Checkpoint(module)


# ---- what the checkpoint consists of ----


@dataclass(frozen=True)
class _Form:
    """All of a value but its data. A weight is made contiguous when it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None

    @classmethod
    def of(cls, value: Value) -> _Form:
        stride = value.stride() if isinstance(value, torch.Tensor) else None
        return cls(value.dtype, tuple(value.shape), stride)

    def stand_in(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return tensor if self.stride is None else tensor.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Part:
    """A tensor of the checkpoint. ``place`` is None if it must be computed, else it is these
    elements of an input: (number of the input, stride, offset)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: tuple[int, tuple[int, ...], int] | None

    def within(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.place is not None
        number, stride, offset = self.place
        tensor = tensors[number]
        return tensor.as_strided(self.shape, stride, tensor.storage_offset() + offset)


@dataclass(frozen=True)
class _Recipe:
    """Tensors of the checkpoint that are made together, and the model's tensors they are made of.

    ``company``: the model's other tensors, if the conversion does not do the same without them.
    """

    inputs: tuple[str, ...]
    parts: tuple[_Part, ...]
    company: dict[str, _Form]

    @property
    def views(self) -> bool:
        return all(part.place is not None for part in self.parts)

    def renames(self, forms: dict[str, _Form]) -> bool:
        """Whether the only part is the only input as it is."""
        if len(self.inputs) != 1 or len(self.parts) != 1:
            return False
        form, part = forms[self.inputs[0]], self.parts[0]
        stride = form.stand_in().stride()
        return part.place == (0, stride, 0) and (part.dtype, part.shape) == (form.dtype, form.shape)


@dataclass(frozen=True)
class _Origin:
    """What a tensor of the checkpoint is made of."""

    names: tuple[str, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Plan:
    """How to make a checkpoint of values of these forms, with these ties.

    A step is a recipe, or a name of the model's with that of the checkpoint. ``kept`` are the names
    that ``save_pretrained`` writes; those of ``origins`` that are not among them are further names
    of tied weights.
    """

    forms: dict[str, _Form]
    tied: list[list[str]]
    steps: list[tuple[str, str] | _Recipe]
    kept: set[str]
    origins: dict[str, _Origin]

    @classmethod
    def of(cls, model: Any, forms: dict[str, _Form], tied: list[list[str]]) -> _Plan:
        spare = set(_spare_names(model, tied))
        main = {name: form for name, form in forms.items() if name not in spare}
        recipes = _recipes(model, main)
        kept = {part.name for recipe in recipes for part in recipe.parts}
        if spare:
            recipes += [
                recipe
                for recipe in _recipes(model, forms)
                if recipe.views and spare.issuperset(recipe.inputs)
                if kept.isdisjoint(part.name for part in recipe.parts)
            ]
        steps: list[tuple[str, str] | _Recipe] = [
            (recipe.inputs[0], recipe.parts[0].name) if recipe.renames(forms) else recipe
            for recipe in recipes
        ]
        origins = {
            part.name: _Origin(recipe.inputs, part.dtype)
            for recipe in recipes
            for part in recipe.parts
        }
        return cls(forms, tied, steps, kept, origins)

    def apply(self, model: Any, values: dict[str, Value]) -> dict[str, Value]:
        converted: dict[str, Value] = {}
        turn = _Turn()
        for step in self.steps:
            if isinstance(step, tuple):
                converted[step[1]] = values[step[0]]
                continue
            inputs = [values[name] for name in step.inputs]
            tensors = [value.detach() for value in inputs if isinstance(value, torch.Tensor)]
            if step.views and len(tensors) == len(inputs):
                for part in step.parts:
                    converted[part.name] = part.within(tensors)
                continue
            batch = _Batch(model, step, inputs, turn)
            for number, part in enumerate(step.parts):
                converted[part.name] = _Converted(batch, number)
        return converted


def _spare_names(model: nn.Module, tied: list[list[str]]) -> Iterator[str]:
    """The names of tied weights under which ``save_pretrained`` does not write them."""
    patterns = []
    for prefix, module in modules_of(model):
        for attribute in ("_tied_weights_keys", "_dynamic_tied_weights_keys"):
            keys = getattr(module, attribute, None) or ()
            patterns += [re.compile(f"{prefix}.{key}" if prefix else key) for key in keys]
    for names in tied:
        matching = [n for n in sorted(names) if any(pattern.search(n) for pattern in patterns)]
        others = [name for name in names if name not in matching]
        main = others[0] if others else matching[-1]
        yield from (name for name in names if name != main)


# ---- learning the recipes from the model's conversion ----


def _recipes(model: nn.Module, forms: dict[str, _Form]) -> list[_Recipe]:
    """
    Raises:
        SourceError: the conversion fails, or what it does cannot be seen from outside.
    """
    recipes = _observed(model, forms, through=True)
    if recipes is None:
        recipes = _observed(model, forms, through=False)
    if recipes is None:
        raise SourceError(
            f"the conversion of {type(model).__name__} to its checkpoint's names writes into the "
            "model's own tensors"
        )
    return [recipe if recipe.views else _with_company(model, recipe, forms) for recipe in recipes]


def _observed(model: nn.Module, forms: dict[str, _Form], through: bool) -> list[_Recipe] | None:
    """What the conversion makes of what, in the model's order; None if that cannot be said.

    Args:
        through: look through ``contiguous()``: its result has the same elements as the tensor,
            which exist in the model's memory already.
    """
    stand_ins = {name: form.stand_in() for name, form in forms.items()}
    watch = _Watch(stand_ins)
    try:
        with _SameElements() if through else nullcontext(), watch:
            made = _run(model, dict(stand_ins))
    except Exception as error:
        if through:
            return None
        raise _failed(model, error) from error
    if watch.inputs_written:
        return None
    order = {name: number for number, name in enumerate(forms)}
    makers: dict[str, list[str]] = {}  # each input with all inputs it is made into something with
    for name, tensor in made.items():
        sources = watch.sources(tensor)
        if not sources:
            raise SourceError(f"{name!r} is made of nothing that the model holds")
        joined = {other for source in sources for other in makers.get(source, [source])}
        together = sorted(joined, key=order.__getitem__)
        makers.update(dict.fromkeys(together, together))
    outputs: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
    for name, tensor in made.items():
        inputs = tuple(makers[min(watch.sources(tensor))])
        outputs.setdefault(inputs, {})[name] = tensor
    return [
        _Recipe(
            inputs,
            tuple(
                _Part(name, t.dtype, tuple(t.shape), _place(t, [stand_ins[i] for i in inputs]))
                for name, t in tensors.items()
            ),
            {},
        )
        for inputs, tensors in sorted(outputs.items(), key=lambda item: order[item[0][0]])
    ]


def _place(
    tensor: torch.Tensor, inputs: list[torch.Tensor]
) -> tuple[int, tuple[int, ...], int] | None:
    as_it_is = not (tensor.is_conj() or tensor.is_neg())
    for number, whole in enumerate(inputs):
        same = _storage(whole) == _storage(tensor) and whole.dtype == tensor.dtype
        if same and as_it_is:
            return number, tensor.stride(), int(tensor.storage_offset())
    return None


def _with_company(model: nn.Module, recipe: _Recipe, forms: dict[str, _Form]) -> _Recipe:
    """A recipe as it must be followed: with only its inputs, if the result is the same."""
    try:
        made = _run(model, {name: forms[name].stand_in() for name in recipe.inputs})
    except Exception:
        made = {}
    expected = {part.name: (part.dtype, part.shape) for part in recipe.parts}
    if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()} == expected:
        return recipe
    others = {name: form for name, form in forms.items() if name not in recipe.inputs}
    return _Recipe(recipe.inputs, recipe.parts, others)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of which inputs each tensor is made. Tensors that share memory are one to it."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs_written = False
        self._inputs = {_storage(tensor) for tensor in inputs.values()}
        self._sources = {_storage(tensor): {name} for name, tensor in inputs.items()}
        self._alive: list[torch.Tensor] = []  # no storage takes the place of an earlier one

    def sources(self, tensor: torch.Tensor) -> set[str]:
        return self._sources.get(_storage(tensor), set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        written = []
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            by_name = {a.name: value for a, value in zip(arguments, args, strict=False)}
            by_name |= kwargs or {}
            written = tree_leaves(
                [by_name.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
            )
            written = [t for t in written if isinstance(t, torch.Tensor)]
        sources = set().union(*map(self.sources, given))
        for tensor in [*made, *written]:
            self._sources.setdefault(_storage(tensor), set()).update(sources)
        self.inputs_written |= any(_storage(tensor) in self._inputs for tensor in written)
        self._alive += made
        return result


class _SameElements(TorchFunctionMode):
    """Makes ``contiguous()`` give the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


# ---- following the recipes ----


class _Turn:
    """Whose parts wait to be read: one batch's at most."""

    def __init__(self) -> None:
        self.batch: _Batch | None = None

    def take(self, batch: _Batch) -> None:
        if self.batch is not None and self.batch is not batch:
            self.batch.waiting.clear()
        self.batch = batch


class _Batch:
    """The parts of one recipe. All are made when one is read; the others wait for their turn."""

    def __init__(self, model: Any, recipe: _Recipe, values: list[Value], turn: _Turn) -> None:
        self.recipe = recipe
        self.collective = any(map(is_collective, values))
        self.refusal = _refusal(values)
        self.waiting: dict[int, torch.Tensor] = {}
        self._pieces: dict[int, list[Piece] | None] = {}
        self._model = model
        self._values = values
        self._turn = turn

    def read(self, number: int) -> torch.Tensor:
        self._turn.take(self)
        if number not in self.waiting:
            self.waiting = dict(enumerate(self._make()))
        return self.waiting.pop(number)

    def pieces(self, number: int) -> list[Piece] | None:
        part = self.recipe.parts[number]
        if not self.recipe.views or part.place is None:
            return None
        whole = self._values[part.place[0]]
        if not isinstance(whole, Weight):
            return None
        if part.place[0] not in self._pieces:
            self._pieces[part.place[0]] = whole.pieces()
        held, block = self._pieces[part.place[0]], _Block.of(part, whole.shape)
        if held is None or block is None:
            return None
        return [piece for piece in map(block.share, held) if piece is not None]

    def identity(self) -> Hashable | None:
        identities = [
            value.identity if isinstance(value, Weight) else identity_of(value)
            for value in self._values
        ]
        return None if None in identities else tuple(identities)

    @torch.no_grad()
    def _make(self) -> list[torch.Tensor]:
        self.waiting.clear()
        recipe, tensors = self.recipe, self._inputs()
        if recipe.views:
            return [part.within(tensors) for part in recipe.parts]
        state = {name: form.stand_in() for name, form in recipe.company.items()}
        state.update(zip(recipe.inputs, tensors, strict=True))
        del tensors
        try:
            made = _run(self._model, state)
        except Exception as error:
            raise _failed(self._model, error) from error
        for part in recipe.parts:
            _require(made.get(part.name), part)
        return [made[part.name] for part in recipe.parts]

    def _inputs(self) -> list[torch.Tensor]:
        """What the parts are made of, weights as they were said to be."""
        tensors = []
        for value in self._values:
            tensor = read(value).detach()
            if isinstance(value, Weight):
                _require(tensor, value)
                tensor = tensor.contiguous()
            tensors.append(tensor)
        return tensors


def _refusal(values: list[Value]) -> Refusal | None:
    """Why nothing can be made of some values."""
    refusals = [value.refusal if isinstance(value, Weight) else None for value in values]
    reason = next((refusal.reason for refusal in refusals if refusal), None)
    if reason is None:
        return None
    return Refusal(reason, all(refusal and refusal.excluded for refusal in refusals))


class _Converted(Weight):
    """A tensor of the checkpoint that is made of tensors of the model."""

    def __init__(self, batch: _Batch, number: int) -> None:
        self._batch = batch
        self._number = number
        part = batch.recipe.parts[number]
        self.dtype = part.dtype
        self.shape = part.shape

    @property
    def identity(self) -> Hashable | None:
        identity = self._batch.identity()
        return None if identity is None else (identity, self._number)

    @property
    def collective(self) -> bool:
        return self._batch.collective

    @property
    def refusal(self) -> Refusal | None:
        return self._batch.refusal

    def read(self) -> torch.Tensor:
        return self._batch.read(self._number)

    def pieces(self) -> list[Piece] | None:
        return self._batch.pieces(self._number)


@dataclass(frozen=True)
class _Block:
    """Where a part lies in the weight it is part of.

    ``starts`` and ``sizes`` are for the weight's dimensions, ``dimensions`` says which of them
    each of the part's is; None is one that the weight lacks, of size 1.
    """

    part: _Part
    starts: list[int]
    sizes: list[int]
    dimensions: list[int | None]

    @classmethod
    def of(cls, part: _Part, whole: tuple[int, ...]) -> _Block | None:
        """None if it is no block of the weight, or its rows do not follow each other there.

        Depends on shapes alone, so that all ranks find the same.
        """
        assert part.place is not None
        _, stride, offset = part.place
        if 0 in whole or 0 in part.shape:
            return None
        starts, sizes = [], [1] * len(whole)
        wide: dict[int, int | None] = {}
        for dimension, step in enumerate(_strides(whole)):
            starts.append(offset // step)
            offset %= step
            if whole[dimension] > 1:
                wide[step] = dimension
        dimensions: list[int | None] = []
        for size, step, packed in zip(part.shape, stride, _strides(part.shape), strict=True):
            own = wide.get(step) if size > 1 else None
            if own is not None and step == packed:
                sizes[own] = size
            elif size > 1:
                return None
            dimensions.append(own)
        ends = map(sum, zip(starts, sizes, strict=True))
        if any(end > size for end, size in zip(ends, whole, strict=True)):
            return None
        return cls(part, starts, sizes, dimensions)

    def share(self, piece: Piece) -> Piece | None:
        """The part of a piece of the weight that lies in this block."""
        assert self.part.place is not None
        flat = len(piece.whole) != len(self.starts)
        count = math.prod(self.part.shape)
        starts, sizes = ([self.part.place[2]], [count]) if flat else (self.starts, self.sizes)
        tensor, offsets = piece.tensor, []
        for dimension, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            origin = piece.offsets[dimension]
            begin = max(start, origin)
            length = min(start + size, origin + tensor.shape[dimension]) - begin
            if length <= 0:
                return None
            tensor = tensor.narrow(dimension, begin - origin, length)
            offsets.append(begin - start)
        if flat:
            return replace(piece, tensor=tensor, whole=(count,), offsets=tuple(offsets))
        shape = [1 if d is None else tensor.shape[d] for d in self.dimensions]
        where = tuple(0 if d is None else offsets[d] for d in self.dimensions)
        tensor = tensor.reshape(shape)
        return replace(piece, tensor=tensor, whole=self.part.shape, offsets=where)


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Of a contiguous tensor."""
    return [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]


# ---- the model's conversion ----


@lru_cache
def _core_model_loading() -> Any:
    """The conversions of transformers 5; None in transformers 4."""
    try:
        return import_module("transformers.core_model_loading")
    except ImportError:
        return None


def _run(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` would write of a state, ties and ignored names aside."""
    loading = _core_model_loading()
    if loading is None:
        return _renamed(model, state)
    converted: dict[str, torch.Tensor] = loading.revert_weight_conversion(_Unwrapped(model), state)
    return converted


class _Unwrapped:
    """A model as its conversion is to see it: the modules without wrappers around them, and a copy
    of the conversions that it was loaded by, because reverting them changes them.

    Those that cannot be reverted unpack a quantised checkpoint. What is sent is not packed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weight_conversions = None  # those of the model's class
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is not None and not _of_an_adapter(conversions):
            self._weight_conversions = deepcopy(list(filter(_reversible, conversions)))

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return modules_of(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _of_an_adapter(conversions: list[Any]) -> bool:
    """Whether ``load_adapter`` left there how it read the adapter, in place of the model's own."""
    patterns = [p for each in conversions for p in getattr(each, "source_patterns", ())]
    return any(pattern.startswith("base_model.model.") for pattern in patterns)


def _reversible(conversion: Any) -> bool:
    try:
        return all(operation.reverse_op for operation in getattr(conversion, "operations", ()))
    except NotImplementedError:
        return False


def _renamed(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The conversion of transformers 4: some models rename, none computes."""
    from transformers import modeling_utils

    lineage = " ".join(kind.__name__.lower() for kind in type(model).__mro__[:-1])
    mapping = {}
    if any(kind in lineage for kind in getattr(modeling_utils, "VLMS", ())):
        mapping = {
            own: re.sub(r"\(.*\)", "", saved.lstrip("^"))
            for saved, own in model._checkpoint_conversion_mapping.items()
        }
    renamed = {}
    for name, tensor in state.items():
        for own, saved in mapping.items():
            name, count = re.subn(own, saved, name)
            if count:
                break
        renamed[name] = tensor
    fixed: dict[str, torch.Tensor] = model._fix_state_dict_keys_on_save(renamed)
    return fixed


def _module_pattern(module: str) -> re.Pattern[str]:
    """What a name looks like that one of ``_keep_in_fp32_modules`` means."""
    if _core_model_loading() is None:
        return re.compile(rf"(^|\.){module}($|\.)")
    return re.compile(module.replace("*", ".*"))


def _require(tensor: torch.Tensor | None, said: _Part | Weight) -> None:
    """
    Raises:
        SourceError: it is not of the dtype and shape that were promised.
    """
    if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (said.dtype, said.shape):
        made = "nothing" if tensor is None else describe(tensor.dtype, tensor.shape)
        raise SourceError(f"{made} was made for it instead of {describe(said.dtype, said.shape)}")


def _failed(model: Any, error: Exception, what: str = "its checkpoint's names") -> SourceError:
    kind = type(error).__name__
    return SourceError(
        f"the conversion of {type(model).__name__} to {what} failed: {kind}: {error!s:.500}"
    )
