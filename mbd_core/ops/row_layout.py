"""The layout of a batch of rows over a paged cache, as every kernel takes it.

Shape legend: R rows, P pages a row.
"""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """All of row r's queries attend to the first `kv_lens_R[r]` keys of its pages.

    cu_seqlens_q   where each row's queries begin among the packed queries, and where the last row ends (R + 1)
    kv_lens_R      at least 1 for a row with queries
    page_table_RP  each row's pages; the entries after them must be valid page numbers too
    page_size      tokens a page
    max_q          queries of the longest row, for kernels that need it on the host; `None`: `for_kernels` finds it
    exact          each row's result must be bitwise independent of the other rows
    rows_each      that many neighbouring rows, of `max_q` queries each, are one sequence's and have the same pages,
                   all through the batch; a kernel that reads a sequence's keys once needs to know it
    """

    cu_seqlens_q: Tensor
    kv_lens_R: Tensor
    page_table_RP: Tensor
    page_size: int
    max_q: int | None = None
    exact: bool = False
    rows_each: int = 1

    @property
    def max_k(self) -> int:
        """The number of keys that a row of the page table can hold."""
        return self.page_table_RP.shape[1] * self.page_size

    def for_kernels(self) -> "RowLayout":
        """The same layout as flash kernels take it: int32, the table contiguous, `max_q` on the host.

        Without `max_q` the longest row is read back from the device, which a CUDA graph cannot capture.
        """
        return replace(
            self,
            cu_seqlens_q=self.cu_seqlens_q.int(),
            kv_lens_R=self.kv_lens_R.int(),
            page_table_RP=self.page_table_RP.int().contiguous(),
            max_q=int(self.cu_seqlens_q.diff().max()) if self.max_q is None else self.max_q,
        )
