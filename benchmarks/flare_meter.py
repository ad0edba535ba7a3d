"""Components for FLARE: bytes on the server's connections, metrics, and what a GPU would do."""

import json
from collections import Counter
from pathlib import Path

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.fuel.f3.sfm.conn_manager import SfmFrameReceiver
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection


class WithoutGpu(FLComponent):
    """Lets FLARE's 8-bit and 4-bit filters quantize on the CPU, as bitsandbytes can.

    They move every tensor to a GPU first, which is left out; and on the CPU, vectors of 4 bits come
    back as rows.
    """

    def __init__(self) -> None:
        from nvflare.app_opt.pt.quantization import dequantizer  # imports bitsandbytes

        super().__init__()
        torch.Tensor.cuda = lambda tensor: tensor
        dequantize = dequantizer.dequantize_4bit

        def of_its_shape(quantized, state, **options):
            return dequantize(quantized, state, **options).reshape(state.shape)

        dequantizer.dequantize_4bit = of_its_shape


class Meter(FLComponent):
    """Counts all frames of this process from the start of a job to its end.

    Args:
        file: where to write the bytes and the metrics.

    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self._bytes: Counter[str] = Counter()
        self._rounds: list[dict[str, float]] = []

    def handle_event(self, event_type, fl_ctx) -> None:
        if event_type == EventType.START_RUN:
            self._watch()
        elif event_type == AppEventType.AFTER_AGGREGATION:
            metrics = fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT).metrics
            self._rounds.append({**metrics, **self._bytes})
        elif event_type == EventType.END_RUN:
            Path(self.file).write_text(json.dumps({"rounds": self._rounds, **self._bytes}))

    def _watch(self) -> None:
        send, receive, count = SfmConnection.send_frame, SfmFrameReceiver.process_frame, self._bytes

        def counting_send(connection, prefix, headers, payload):
            send(connection, prefix, headers, payload)
            count["down"] += prefix.length

        def counting_receive(receiver, frame):
            count["up"] += len(frame)
            receive(receiver, frame)

        SfmConnection.send_frame = counting_send
        SfmFrameReceiver.process_frame = counting_receive
