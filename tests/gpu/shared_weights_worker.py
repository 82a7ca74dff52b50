"""What the tests of the shared weights ask of a vLLM worker beyond the fork's own methods."""

from __future__ import annotations

from verl.jetrl.rollout.worker_extension import JetRLWorkerExtension


class PoisonExtension(JetRLWorkerExtension):
    """Fills with NaN what comes back from sleep: whatever lay there is garbage, at the address it had before."""

    def poison_on_wake(self) -> None:
        """From now on each wake-up hands out memory whose every byte is 0xFF: NaN in BF16 and FP8, -1 as an integer.

        Before vLLM restores what it saved, so that only what nobody restores stays NaN.
        """
        from vllm.device_allocator.cumem import CuMemAllocator, libcudart

        allocator = CuMemAllocator.get_instance()
        wake_up, self.poisoned = allocator.wake_up, 0

        def poisoned_wake_up(tags: list[str] | None = None) -> None:
            wake_up(tags)
            for pointer, data in allocator.pointer_to_data.items():
                if tags is None or data.tag in tags:
                    libcudart.cudaMemset(pointer, 0xFF, data.handle[1])
                    self.poisoned += data.handle[1]
            libcudart.cudaDeviceSynchronize()

        allocator.wake_up = poisoned_wake_up

    def stop_poisoning(self) -> int:
        """Bytes that were filled since the start."""
        from vllm.device_allocator.cumem import CuMemAllocator

        del CuMemAllocator.get_instance().wake_up
        return self.poisoned
