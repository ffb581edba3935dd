"""The same model through ONNX and TensorRT, behind the padded forward. Needs the package `tensorrt`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gte_vectorize.bench.padded import open_padded
from gte_vectorize.encoder.forward import PaddedForward
from gte_vectorize.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "last_hidden_state"


class EngineModel:
    """Stands where a transformers model stands: ids and mask, int64[rows, length], → last hidden states."""

    def __init__(self, engine: Any, hidden: int) -> None:
        self._engine, self._context, self._hidden = engine, engine.create_execution_context(), hidden

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        import torch

        states = torch.empty(*input_ids.shape, self._hidden, dtype=torch.float16, device=input_ids.device)
        inputs = [tensor.contiguous() for tensor in (input_ids, attention_mask)]
        for name, tensor in zip(INPUTS, inputs, strict=True):
            self._context.set_input_shape(name, tuple(tensor.shape))
            self._context.set_tensor_address(name, tensor.data_ptr())
        self._context.set_tensor_address(OUTPUT, states.data_ptr())
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("TensorRT could not run the engine")
        return SimpleNamespace(last_hidden_state=states)

    __call__: Callable[..., SimpleNamespace] = forward


def open_engine(spec: ModelSpec, *, rows: int) -> PaddedForward:
    """Export in fp16 and build, for batches of at most `rows` rows. Raises ImportError without `tensorrt`."""
    import tensorrt

    forward = open_padded(spec, attention="sdpa", dtype="fp16", device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export(forward.model, file, "cuda")
        plan = _build(tensorrt, file, rows, spec.tokenizer.max_length)
    engine = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR)).deserialize_cuda_engine(plan)
    hidden = int(spec.config.get("hidden_size") or spec.config["dim"])
    return PaddedForward(EngineModel(engine, hidden), forward.pooling, forward.head, forward.pad_id)


def export(model: Any, file: Path, device: str) -> None:
    """ONNX of ids and mask → last hidden states, rows and length left open."""
    import torch

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            states: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return states

    ids = torch.ones(2, 8, dtype=torch.int64, device=device)
    axes = {name: {0: "rows", 1: "length"} for name in (*INPUTS, OUTPUT)}
    torch.onnx.export(
        States().eval(),
        (ids, torch.ones_like(ids)),
        str(file),
        input_names=list(INPUTS),
        output_names=[OUTPUT],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )


def _build(tensorrt: Any, file: Path, rows: int, limit: int) -> Any:
    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    builder = tensorrt.Builder(logger)
    # Strongly typed: the precisions are those of the export.
    flags = 1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        raise RuntimeError(f"the ONNX parser says: {parser.get_error(0).desc()}")
    profile = builder.create_optimization_profile()
    for name in INPUTS:
        profile.set_shape(name, (1, 1), (rows, min(limit, 256)), (rows, limit))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("the builder gave no engine")
    return plan
