"""What an engine's worker says of its memory; named to vLLM as `worker_extension_cls`."""

from typing import Any

import psutil
import torch

SIZES = ("device", "awake", "ours", "ours_awake", "host")


class Memory:
    """Adds a method to vLLM's worker, in whose process the engine runs too."""

    _capturer: Any

    def memory_of_tests(self) -> dict[str, int]:
        """In bytes: in use on the device, mapped by vLLM's allocator for sleep mode in all and of
        ours (and how much of that there is), and in use by this process on the host."""
        from vllm.device_allocator.cumem import CuMemAllocator

        free, total = torch.cuda.mem_get_info()
        allocations = CuMemAllocator.get_instance().pointer_to_data
        ours = [data for data in allocations.values() if data.tag == "routed_experts"]
        return {
            "device": total - free,
            "awake": sum(data.handle[1] for data in allocations.values() if not data.is_asleep),
            "ours": sum(data.handle[1] for data in ours),
            "ours_awake": sum(data.handle[1] for data in ours if not data.is_asleep),
            "host": psutil.Process().memory_info().rss,
        }

    def tensors_outside_of_tests(self) -> list[str]:
        """Our tensors on the device that do not lie in the pool of ours that sleep empties."""
        from vllm.device_allocator.cumem import CuMemAllocator

        allocations = CuMemAllocator.get_instance().pointer_to_data.items()
        pool = [
            (ptr, ptr + data.handle[1]) for ptr, data in allocations if data.tag == "routed_experts"
        ]
        pipeline = self._capturer.pipeline
        tensors = {
            "device cache": self._capturer.cache.ids,
            "staging": pipeline._copier._device_words,
        }
        return [
            name
            for name, tensor in tensors.items()
            if not any(
                first <= tensor.data_ptr() <= tensor.data_ptr() + tensor.nbytes <= end
                for first, end in pool
            )
        ]
