"""The work list: the one format that plans write and kernels read.

A plan turns one step into *items*. An item is one (sequence, kv head, rows, kv range), small enough
that items balance over the workers, large enough that the K/V it streams outweighs its start.

Rows. The query rows of a sequence and kv head are its new tokens times the query heads of the
group, flattened: ``row = token * group_size + head_in_group``. So a decode item has ``group_size``
rows, and a prefill item a tile of them::

    new tokens of a sequence     0    0    0    1    1    1    2    2    2      (group_size 3)
    query head in the group      0    1    2    0    1    2    0    1    2
    row                          0    1    2    3    4    5    6    7    8
    items (tile of 4 rows)      [0              4)[4              8)[8 9)

Visibility. Row r sees the kv positions ``[kv_begin, min(kv_end, visible + r // group_size))``. With
a causal mask ``visible = seq_len - q_len + 1``; without one the plan writes ``visible = kv_end``.

Split. A kv range starts at an absolute multiple of the split length. A sequence with one range
writes ``out`` at once (``partial == -1``). Several ranges write float32 partials, which the merge
kernel folds left to right; which worker computed what leaves no trace in the bits::

    kv positions   0        512       1024     1300
    items          [0   512)[512  1024)[1024 1300)
    partial rows    p0+token p1+token   p2+token        p(i+1) - p(i) = q_len of the sequence
"""

from __future__ import annotations

from enum import IntEnum


class Item(IntEnum):
    """Columns of ``work_items`` ``[num_items, len(Item)]`` int32."""

    SEQ = 0  # row of the block table
    KV_HEAD = 1
    Q_START = 2  # row of q where the sequence's first new token stands
    ROW_BEGIN = 3  # half-open range of flattened rows
    ROW_END = 4
    KV_BEGIN = 5  # half-open range of kv positions, an absolute multiple of the split length
    KV_END = 6
    VISIBLE = 7  # kv positions that the rows of token 0 see
    PARTIAL = 8  # partial row of the sequence's token 0; -1: write out and lse directly


class Merge(IntEnum):
    """Columns of ``merge_items`` ``[num_merges, len(Merge)]`` int32."""

    OUT_ROW = 0  # row of out
    PARTIAL = 1  # first partial row
    COUNT = 2  # number of partials
    STRIDE = 3  # distance between consecutive partials of this row


#: ``work_offsets`` ``[num_workers + 1]`` int32: worker w does ``items[offsets[w]:offsets[w + 1]]``.
ITEM_FIELDS = len(Item)
MERGE_FIELDS = len(Merge)

#: A sequence with more new tokens than this is never split over kv: its row tiles fill the workers
#: already, and its partials would outgrow the caches. Follows from the sequence alone, so bits stay
#: independent of the batch.
MAX_SPLIT_Q_LEN = 64
