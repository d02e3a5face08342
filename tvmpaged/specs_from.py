"""Lists of specs from what people know: a model, or sizes.

One request is the cross product of its repeatable fields, as flags, as a table of a matrix file
or as a call.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from tvmpaged.errors import UserError
from tvmpaged.model_source import ModelSource, find_model
from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec, dtype_name

_DEFAULT_BLOCK_SIZES = (16,)
_DEFAULT_DTYPES = ("bfloat16",)
_DEFAULT_LAYOUTS = ("HND",)

#: Query heads per K/V head, and the K/V heads, where they are known.
Group = tuple[int, int | None]
#: Specs, each with the K/V heads it was asked for with; None where only a group size is known.
Wanted = dict[AttentionSpec, int | None]


@dataclass(frozen=True)
class ModelShape:
    """What of a model its attention kernels depend on.

    Parameters
    ----------
    num_qo_heads, num_kv_heads, head_dim : int
        Its sizes.
    dtype : str
        What its weights are loaded as.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return group_size(self.num_qo_heads, self.num_kv_heads)


@dataclass(frozen=True)
class SpecRequest:
    """Which specs are wanted; every field is repeatable and an empty one takes its default.

    Parameters
    ----------
    spec : tuple of str
        Whole specs, taken as they are.
    model : tuple of str
        Folders, GGUF files or hub ids: heads, head_dim and (unless given) dtype come from there.
    num_qo_heads, num_kv_heads : tuple of int
        Paired by position.
    group_size : tuple of int
        Instead of the two above.
    head_dim, block_size, dtype, layout, kernel : tuple
        Combined each with each.
    """

    spec: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    num_qo_heads: tuple[int, ...] = ()
    num_kv_heads: tuple[int, ...] = ()
    group_size: tuple[int, ...] = ()
    head_dim: tuple[int, ...] = ()
    block_size: tuple[int, ...] = ()
    dtype: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()

    def specs(self) -> Wanted:
        """Return the specs, each once, in the order they were asked for.

        Raises
        ------
        ValueError
            Naming the field that is missing, contradicts another or is not supported.
        """
        found: Wanted = {AttentionSpec.parse(text): None for text in self.spec}
        heads = self.num_qo_heads or self.num_kv_heads or self.group_size
        if self.model and (heads or self.head_dim):
            raise ValueError("model gives heads and head_dim: name a model or sizes, not both")
        for model in self.model:
            shape = model_shape(model)
            group = shape.group_size, shape.num_kv_heads
            add(found, self._products([group], [shape.head_dim], [shape.dtype]))
        if heads or self.head_dim:
            groups = self._groups()
            if not groups or not self.head_dim:
                missing = "head_dim" if groups else "group_size (or num_qo_heads and num_kv_heads)"
                raise ValueError(f"{missing} is missing; give a model, or heads and head_dim")
            add(found, self._products(groups, self.head_dim, _DEFAULT_DTYPES))
        elif not found and (self.block_size or self.dtype or self.layout or self.kernel):
            raise ValueError("sizes are missing; give a model, or heads and head_dim, or a spec")
        return found

    def _groups(self) -> list[Group]:
        if self.group_size and (self.num_qo_heads or self.num_kv_heads):
            raise ValueError("group_size follows from num_qo_heads and num_kv_heads: give either")
        if len(self.num_qo_heads) != len(self.num_kv_heads):
            raise ValueError(
                f"num_qo_heads={list(self.num_qo_heads)} and num_kv_heads="
                f"{list(self.num_kv_heads)} are pairs: give as many of one as of the other"
            )
        pairs = zip(self.num_qo_heads, self.num_kv_heads, strict=True)
        sizes = [(size, None) for size in self.group_size]
        return [*sizes, *((group_size(qo, kv), kv) for qo, kv in pairs)]

    def _products(
        self, groups: Iterable[Group], head_dims: Iterable[int], dtypes: Iterable[str]
    ) -> Iterator[tuple[AttentionSpec, int | None]]:
        return (
            (AttentionSpec.make(kernel, dtype, head_dim, group, block_size, layout=layout), heads)
            for dtype, head_dim, (group, heads), block_size, layout, kernel in product(
                self.dtype or dtypes,
                head_dims,
                groups,
                self.block_size or _DEFAULT_BLOCK_SIZES,
                self.layout or _DEFAULT_LAYOUTS,
                self.kernel or ATTENTION_KERNELS,
            )
        )


def add(found: Wanted, more: Iterable[tuple[AttentionSpec, int | None]]) -> None:
    """Add specs to those that are wanted; the first that names K/V heads counts."""
    for spec, num_kv_heads in more:
        if found.get(spec) is None:
            found[spec] = num_kv_heads


def group_size(num_qo_heads: int, num_kv_heads: int) -> int:
    """Return the query heads per kv head.

    Raises
    ------
    ValueError
        When the kv heads do not divide the query heads.
    """
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads={num_qo_heads} must be a positive multiple of num_kv_heads="
            f"{num_kv_heads}"
        )
    return num_qo_heads // num_kv_heads


def matrix_specs(file: Path) -> Wanted:
    """Read a matrix file: tables ``[[specs]]``, each with the fields of `SpecRequest`.

    A field holds one value or a list; a table is the cross product of its fields.

    Raises
    ------
    FileNotFoundError, UserError, ValueError
        Naming the file, and the table and field at fault.
    """
    if not file.is_file():
        raise FileNotFoundError(f"the matrix file {file} does not exist")
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no valid TOML: {error}") from error
    tables = content.get("specs")
    if set(content) != {"specs"} or not isinstance(tables, list) or not tables:
        raise ValueError(f"{file} must hold one or more tables [[specs]] and nothing else")
    found: Wanted = {}
    for number, table in enumerate(tables, start=1):
        try:
            add(found, _request(table).specs().items())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: table {number} of [[specs]]: {error}") from error
    return found


def _request(table: Mapping[str, Any]) -> SpecRequest:
    kinds = {field.name: int if "int" in str(field.type) else str for field in fields(SpecRequest)}
    values: dict[str, tuple[Any, ...]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise ValueError(f"{key!r} is no field; there are: {', '.join(kinds)}")
        items = tuple(value) if isinstance(value, list) else (value,)
        if not all(type(item) is kinds[name] for item in items):
            raise TypeError(f"{key} = {value!r} must hold {kinds[name].__name__} values")
        values[name] = items
    return SpecRequest(**values)


def model_shape(model: str) -> ModelShape:
    """Return the attention sizes of a model, without loading its weights.

    Parameters
    ----------
    model : str
        What `find_model` takes: a folder with ``config.json``, a GGUF file, ``package:NAME`` or a
        hub id; all but the first need the ``hf`` extra.

    Raises
    ------
    FileNotFoundError
        When it looks like a path and nothing is there.
    ValueError
        When its configuration is not that of a model with plain or grouped-query attention.
    """
    source = find_model(model)
    config = Path(source.folder) / "config.json"
    if source.gguf_file is not None or not source.is_local:
        return _shape(_auto_config(source), model)
    if not config.is_file():
        raise FileNotFoundError(f"model={model!r} has no config.json and is no GGUF file")
    return _shape(json.loads(config.read_text(encoding="utf-8")), model)


def _auto_config(source: ModelSource) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.folder, **source.arguments)
    content: dict[str, Any] = config.to_dict()
    return content


def _shape(config: Mapping[str, Any], model: str) -> ModelShape:
    # Models that also see or hear keep the language model's part in a table of its own.
    text = {**config, **(config.get("text_config") or {})}
    if text.get("kv_lora_rank"):
        raise ValueError(f"model={model!r} uses latent attention, which is not supported")
    num_qo_heads = text.get("num_attention_heads")
    if not isinstance(num_qo_heads, int):
        raise ValueError(f"model={model!r}: its configuration lacks num_attention_heads")
    head_dim = text.get("head_dim") or (text.get("hidden_size") or 0) // num_qo_heads
    # Without a statement of their own weights are loaded as float32.
    dtype = text.get("dtype") or text.get("torch_dtype") or "float32"
    return ModelShape(
        num_qo_heads=num_qo_heads,
        num_kv_heads=text.get("num_key_value_heads") or num_qo_heads,
        head_dim=head_dim,
        dtype=dtype_name(dtype),
    )
