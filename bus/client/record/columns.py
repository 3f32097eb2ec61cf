"""The columns of a record, and the conversion of a `Generation` to a row and back.

Columns are only added. Readers take columns by name: a missing column is empty, and an unknown one is ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ....schemas.chunk import FinishReason
from ....schemas.errors import ErrorCode, InvalidRequest, RequestError, request_error
from ....schemas.install import pip_install
from ....schemas.messages import encode_json
from ....schemas.request import GenerateRequest
from ....schemas.sampling import SamplingParams
from ...protocol.stream.token_masks import TokenMasks
from ..generation import Generation, SampleKey

__all__ = [
    "KEY",
    "KINDS",
    "Kind",
    "RecordRow",
    "expert_row",
    "import_pyarrow",
    "row_bytes",
    "sample_row",
    "schema_of",
    "with_siblings",
]

Kind = Literal["samples", "experts", "scores"]
KINDS: Final[tuple[Kind, ...]] = ("samples", "experts", "scores")
"""Kinds of rows. Each kind has files of its own."""

# In the words of pyarrow's `type_for_alias`, with `[x]` for lists.
KEY: Final = {"client": "string", "number": "int64", "child": "int32"}
SCALARS: Final = {
    "request_id": "string",
    "model": "string",
    "prompt_len": "int32",
    "start": "int32",
    "finish_reason": "string",
    "stop_reason": "int32",
    "cached_tokens": "int32",
    "attempts": "int32",
    "parts": "int32",
    "exact": "bool",
    "opened_at": "double",
    "ended_at": "double",
}
"""Fields of a `Generation` that are columns as they are."""
VECTORS: Final = {
    "token_ids": "int32",
    "logprobs": "float",
    "weight_versions": "int32",
    "lora_versions": "int32",
    "kv_mixed": "bool",
}
"""Fields of a `Generation` that are lists, with the type of their items."""
ARRAYS: Final = (
    "top_token_ids",
    "top_logprobs",
    "prompt_logprobs",
    "prompt_top_token_ids",
    "prompt_top_logprobs",
)
"""Fields of a `Generation` that are bytes with a shape and a dtype."""
MASKS: Final = ("mask_counts", "mask_token_ids")
SPANS: Final = ("kv_version_spans", "kv_lora_version_spans")
DERIVED: Final = {
    "lora": "string",
    "num_tokens": "int32",
    "newest_version": "int32",
    "lag": "int32",
    "outcome": "string",
    "group_key": "string",
    "step": "int64",
    "num_siblings": "int32",
}
"""Columns for analyses: the length; the newest version that the fleet had; the versions by which the oldest token is
behind it; `taken`, `dropped` or `failed` with the key and the step of a group; the rows after this one that are
siblings of this sample."""
ROW_BYTES: Final = 512
"""Estimated size of a row without its arrays."""


def import_pyarrow() -> Any:
    """Return pyarrow, which only records need.

    Raises:
        InvalidRequest: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as exc:
        problem = f"needs {exc.name}, which is not installed"
        raise InvalidRequest(field="record", problem=problem, allowed=pip_install("data")) from exc
    return pyarrow


def schema_of(kind: Kind) -> Any:
    """Return the Arrow schema of the rows of a kind."""
    pa = import_pyarrow()
    named = pa.type_for_alias
    array = pa.struct([("data", pa.large_binary()), ("dtype", pa.string()), ("shape", pa.list_(pa.int32()))])
    columns = {name: named(alias) for name, alias in KEY.items()}
    if kind == "experts":
        columns |= {"routed_experts": array}
    elif kind == "scores":
        metrics = pa.map_(pa.string(), pa.float64())
        columns |= {"scored_at": pa.float64(), "reward": pa.float64(), "advantage": pa.float64(), "metrics": metrics}
    else:
        columns |= {name: named(alias) for name, alias in (SCALARS | DERIVED).items()}
        columns |= {name: pa.list_(named(alias)) for name, alias in VECTORS.items()}
        columns |= dict.fromkeys(("sampling", "request", "error"), pa.string())
        columns |= {"prompt_token_ids": pa.list_(pa.int32()), "worker_ids": pa.list_(pa.string())}
        columns |= dict.fromkeys(SPANS, pa.list_(pa.list_(pa.int32())))
        columns |= dict.fromkeys((*ARRAYS, *MASKS), array)
    return pa.schema(columns)


def sample_row(generation: Generation, newest_version: int | None) -> dict[str, Any]:
    """Return the row of a sample, with copies of its arrays: the caller may change the originals.

    Args:
        newest_version: newest version of the model, or of its adapter, at any worker. None: unknown.
    """
    request, masks = generation.request, generation.sampling_mask
    versions = generation.weight_versions if generation.lora_versions is None else generation.lora_versions
    row: dict[str, Any] = {name: getattr(generation, name) for name in SCALARS}
    row |= {name: np.array(value) for name in VECTORS if (value := getattr(generation, name)) is not None}
    row |= {name: _packed(value) for name in ARRAYS if (value := getattr(generation, name)) is not None}
    row |= {name: getattr(generation, name) for name in (*KEY, *SPANS, "worker_ids", "lora") if name not in KEY}
    if masks is not None:
        row |= dict(zip(MASKS, (_packed(masks.counts), _packed(masks.token_ids)), strict=True))
    if newest_version is not None and len(versions):
        row["lag"] = max(newest_version - int(versions.min()), 0)
    return row | {
        **_key(generation),
        "prompt_token_ids": request.prompt_token_ids,
        "sampling": encode_json(request.sampling).decode(),
        "request": encode_json(_other_fields(request)).decode(),
        "error": None if generation.error is None else encode_json(_error_fields(generation.error)).decode(),
        "num_tokens": len(generation.token_ids),
        "num_siblings": len(generation.siblings),
        "newest_version": newest_version,
    }


def expert_row(generation: Generation) -> dict[str, Any] | None:
    """Return the row of a sample's experts, with a copy of them. None without experts."""
    rows = generation.routed_experts
    return None if rows is None else {**_key(generation), "routed_experts": _packed(rows)}


def row_bytes(row: Mapping[str, Any]) -> int:
    """Return the estimated size of a row in memory."""
    arrays = (value for value in row.values() if isinstance(value, np.ndarray))
    packed = (value for value in row.values() if isinstance(value, dict))
    return ROW_BYTES + sum(array.nbytes for array in arrays) + sum(len(item.get("data", b"")) for item in packed)


def _key(generation: Generation) -> dict[str, Any]:
    return {} if generation.key is None else generation.key._asdict()


def _packed(array: npt.NDArray[Any]) -> dict[str, Any]:
    return {"data": array.tobytes(), "dtype": array.dtype.str, "shape": array.shape}


def _other_fields(request: GenerateRequest) -> dict[str, Any]:
    names = (name for name in request.__struct_fields__ if name not in ("prompt_token_ids", "sampling"))
    fields = {name: getattr(request, name) for name in names}
    return {name: value for name, value in fields.items() if value is not None}


def _error_fields(error: RequestError) -> dict[str, str]:
    details = {name: getattr(error, name, "") for name in ("field", "problem", "allowed")}
    return {"code": str(error.code), "message": error.message, "request_id": error.request_id, **details}


class RecordRow:
    """One row of a batch of rows."""

    def __init__(self, batch: Any, index: int) -> None:
        self._batch = batch
        self._index = index
        self._names = batch.schema.names

    def __repr__(self) -> str:
        """Return one line with the place."""
        return f"<RecordRow {self._index} of {self._batch.num_rows}>"

    def value(self, name: str) -> Any:
        """Return a value as a Python object. None if it is null or if the batch has no such column."""
        return self._batch.column(name)[self._index].as_py() if name in self._names else None

    def vector(self, name: str) -> "npt.NDArray[Any] | None":
        """Return a list as a writable array. None if it is null or if the batch has no such column."""
        values = self._batch.column(name)[self._index].values if name in self._names else None
        return None if values is None else np.array(values.to_numpy(zero_copy_only=False))

    def array(self, name: str) -> "npt.NDArray[Any] | None":
        """Return bytes with a shape as a writable array. None if they are null or if there is no such column."""
        packed = self.value(name)
        if packed is None:
            return None
        return np.frombuffer(packed["data"], packed["dtype"]).reshape(packed["shape"]).copy()

    @property
    def key(self) -> SampleKey:
        """Key of the sample."""
        return SampleKey(*(self.value(name) for name in KEY))

    def generation(self) -> Generation:
        """Return the sample, without its experts and siblings."""
        fields: dict[str, Any] = {name: value for name in SCALARS if (value := self.value(name)) is not None}
        fields |= {name: self._typed(name, alias) for name, alias in VECTORS.items()}
        fields |= {name: self.array(name) for name in ARRAYS}
        fields |= {name: spans and tuple(map(tuple, spans)) for name in SPANS for spans in [self.value(name)]}
        counts, token_ids = (self.array(name) for name in MASKS)
        if counts is not None and token_ids is not None:
            fields["sampling_mask"] = TokenMasks(counts, token_ids)
        fields["finish_reason"] = FinishReason(fields["finish_reason"])
        return Generation(
            **fields,
            request=self._request(),
            child=self.key.child,
            key=self.key,
            routed_experts=None,
            worker_ids=tuple(self.value("worker_ids") or ()),
            error=self._error(),
        )

    def _typed(self, name: str, alias: str) -> "npt.NDArray[Any] | None":
        vector = self.vector(name)
        return None if vector is None else vector.astype({"float": "f4", "int32": "i4"}.get(alias, alias), copy=False)

    def _request(self) -> GenerateRequest:
        fields = msgspec.json.decode(self.value("request"))
        known = {name: value for name, value in fields.items() if name in GenerateRequest.__struct_fields__}
        sampling = msgspec.json.decode(self.value("sampling"), type=SamplingParams)
        prompt = self._batch.column("prompt_token_ids")[self._index].values.to_numpy()
        return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, **known)

    def _error(self) -> RequestError | None:
        text = self.value("error")
        if text is None:
            return None
        fields = msgspec.json.decode(text)
        return request_error(ErrorCode(fields.pop("code")), fields.pop("message"), **fields)


def with_siblings(first: Generation, siblings: list[Generation]) -> Generation:
    """Return the first sample of a request with the others, which share its request."""
    if not siblings:
        return first
    return replace(first, siblings=tuple(replace(sibling, request=first.request) for sibling in siblings))
