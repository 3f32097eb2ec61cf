"""The golden messages of sampling masks by name. As in `vectors`, messages are appended and never edited."""

import msgspec
import numpy as np

from rollbus.schemas.chunk import Chunk, SamplingMask
from rollbus.schemas.messages import Frame, RequestMessage, encode
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.support.arrays import little_endian

MASK = SamplingMask(little_endian(np.array([3, 1]), "<i4"), little_endian(np.array([5, 300, 151_643, 7]), "<i4"))
"""A mask with three ids for the first token and one id for the second."""

MASK_VECTORS: dict[str, RequestMessage | Frame] = {
    "request_sampling_mask": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        request=msgspec.Raw(
            encode(
                GenerateRequest(
                    prompt_token_ids=[1, 2],
                    request_id="i",
                    sampling=SamplingParams(top_k=3),
                    return_sampling_mask=True,
                )
            )
        ),
    ),
    "frame_sampling_mask": Frame(
        1,
        "incarnation",
        7,
        [],
        [
            Chunk(
                request_id="i",
                attempt=0,
                child=0,
                chunk_index=0,
                weight_version=7,
                token_ids_data=little_endian(np.array([300, 7]), "<i4"),
                logprobs_data=little_endian(np.array([-0.5, 0.0]), "<f4"),
                sampling_mask=MASK,
            )
        ],
        0,
        "life-1",
    ),
}
