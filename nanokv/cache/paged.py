"""Pages of a few tokens from one pool, as PagedAttention does (Kwon et al. 2023, arXiv 2309.06180).

A sequence owns a table of page numbers, shared by all layers; page p of layer i is `pool.keys[i][p]`. Nothing is
reserved: a page is taken when the first token of it comes, and goes back when its last owner lets go of it. Forked
sequences share pages; whoever writes into a shared page copies it first. The attention function gets dense keys,
gathered from the pages: one copy of S rows a layer a step, the price of keeping every kernel out of this file.
"""

import weakref
from collections import Counter

import torch

from nanokv.cache.base import KVCache, LayerCache, check_index
from nanokv.errors import CacheError, CapacityError


class PagePool:
    """`pages` pages of `page_size` tokens for all layers; reference counts say how many tables hold each page."""

    def __init__(self, config, pages: int, page_size: int):
        self.config, self.page_size = config, page_size
        self.references = [0] * pages
        self.free = list(range(pages - 1, -1, -1))  # a stack: the page that was freed last is still in the CPU's cache
        self.keys = self.values = None  # (L,P,Hk,page,D) once the dtype is known

    def storage(self, like):
        """Take the memory, at the first append: P · page · 2·L·Hk·D values."""
        if self.keys is None:
            L, P, D = self.config.num_hidden_layers, len(self.references), self.config.head_dim
            shape = (L, P, self.config.num_key_value_heads, self.page_size, D)
            with torch.inference_mode(False):
                self.keys, self.values = (torch.empty(shape, dtype=like.dtype, device=like.device) for _ in "kv")
        page, new = ((x.shape[-3], x.shape[-1], x.dtype, x.device) for x in (self.keys, like))
        if page != new:  # a broadcast or a cast would hide the mistake
            have, new = (f"{tuple(x.shape[-4:])} {x.dtype}" for x in (self.keys, like))
            where = "" if self.keys.device == like.device else f": on {like.device}, not {self.keys.device}"
            raise CacheError(f"cannot append keys {new} to a cache of {have} (pages,Hk,page,D){where}")

    def take(self, count: int) -> list[int]:
        """So many free pages, or CapacityError and nothing changed."""
        if count > len(self.free):
            self.exhausted(count)
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.references[page] = 1
        return taken

    def exhausted(self, count: int):
        """What a pool does that is too small: this one refuses."""
        raise CapacityError(
            f"the page pool is exhausted: {count} pages of {self.page_size} tokens wanted, "
            f"{len(self.free)} of {len(self.references)} free",
            hint="free a sequence, or make the pool larger",
        )

    @property
    def limit(self) -> int | None:
        """Tokens that fit at most; None = as memory allows."""
        return len(self.references) * self.page_size

    def share(self, pages):
        """One more owner for each."""
        for page in pages:
            self.references[page] += 1

    def release(self, pages):
        """One owner less; a page without an owner is free."""
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)

    @property
    def bytes_per_page(self) -> int:
        """2 (K and V) · L · Hk · page · D · itemsize."""
        return 0 if self.keys is None else 2 * self.keys[:, 0].nbytes


class ElasticPool(PagePool):
    """A pool that takes more memory when it runs out: it at least doubles, so a page is copied once or twice."""

    limit = None

    def exhausted(self, count: int):
        held = len(self.references)
        pages = max(count - len(self.free), held)
        self.references += [0] * pages
        self.free = list(range(held + pages - 1, held - 1, -1)) + self.free
        if self.keys is not None:
            with torch.inference_mode(False):
                more = [torch.empty_like(x[:, :1]).expand(-1, pages, -1, -1, -1) for x in (self.keys, self.values)]
                self.keys, self.values = torch.cat((self.keys, more[0]), 1), torch.cat((self.values, more[1]), 1)


class PagedCache(KVCache):
    """B sequences of equal length over one pool: `tables[b]` lists the pages of row b, oldest first."""

    def __init__(self, pool: PagePool, batch_size: int = 1):
        super().__init__((PagedLayer(self, i) for i in range(pool.config.num_hidden_layers)), pool.config)
        self.pool, self.tables = pool, [[] for _ in range(batch_size)]

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.tables)

    @property
    def capacity(self) -> int | None:
        """Tokens a row, if nobody else takes pages."""
        pool = self.pool
        return None if pool.limit is None else len(pool.references) // len(self.tables) * pool.page_size

    def reserve(self, start: int, end: int):
        """Pages for positions start … end−1 of every row, none of them shared; every layer asks, the first one gets."""
        size, pool = self.pool.page_size, self.pool
        first, last = start // size, -(-end // size)  # pages that will be written: first … last − 1
        shared, seen = [], Counter()
        for row, table in enumerate(self.tables):
            for i in range(first, min(last, len(table))):
                seen[table[i]] += 1
                if pool.references[table[i]] > seen[table[i]]:  # the last owner of a page keeps it
                    shared.append((row, i))
        missing = sum(max(0, last - len(table)) for table in self.tables)
        fresh = pool.take(len(shared) + missing)  # all or nothing
        for row, i in shared:  # copy on write
            old, new = self.tables[row][i], fresh.pop()
            pool.keys[:, new], pool.values[:, new] = pool.keys[:, old], pool.values[:, old]
            pool.release([old])
            self.tables[row][i] = new
        for table in self.tables:
            while len(table) < last:
                table.append(fresh.pop())

    def truncate(self, n: int):
        super().truncate(n)
        n = max((layer.length for layer in self), default=0)  # what an append that failed had reserved goes as well
        keep = -(-n // self.pool.page_size)
        for table in self.tables:
            self.pool.release(table[keep:])
            del table[keep:]

    def resize(self, rows: int):
        """Another number of rows, as long as nothing is stored."""
        if rows != len(self.tables) and not any(self.tables):
            self.tables = [[] for _ in range(rows)]

    def free(self):
        """Give every page back; the cache is empty afterwards."""
        self.truncate(0)

    def fork(self) -> "PagedCache":
        copy = type(self)(self.pool, len(self.tables))
        copy._adopt(self.tables, self.length)
        return copy.made_like(self)

    def reorder(self, index):
        index, old = check_index(index, rows=len(self.tables)), self.tables
        self._adopt([old[i] for i in index.tolist()], self.length)
        for table in old:
            self.pool.release(table)

    def _adopt(self, tables, length: int):
        self.tables = [list(table) for table in tables]
        for table in self.tables:
            self.pool.share(table)
        for layer in self:
            layer.length = length

    def __del__(self):
        for table in getattr(self, "tables", ()):
            self.pool.release(table)

    @property
    def nbytes(self) -> int:
        """Pages in use by this cache; a page shared by rows counts once."""
        return len({page for table in self.tables for page in table}) * self.pool.bytes_per_page


class PagedLayer(LayerCache):
    """One layer's view of the pages."""

    def __init__(self, parent: PagedCache, layer: int):
        self.parent, self.layer, self.length = weakref.proxy(parent), layer, 0  # no cycle: pages go back at once

    def append(self, k, v):
        pool, start, end = self.parent.pool, self.length, self.length + k.shape[2]
        if k.shape[0] != len(self.parent.tables):
            raise CacheError(f"cannot append keys {tuple(k.shape)} to {len(self.parent.tables)} rows")
        pool.storage(k)
        self.parent.reserve(start, end)
        position = torch.arange(start, end, device=k.device)  # (T,)
        page = self.table(k.device)[:, position // pool.page_size]  # (B,T)
        slot = position % pool.page_size  # (T,)
        pool.keys[self.layer][page, :, slot] = k.transpose(1, 2)  # (B,T,Hk,D)
        pool.values[self.layer][page, :, slot] = v.transpose(1, 2)
        self.length = end
        return self.gather(pool.keys), self.gather(pool.values)

    @property
    def rows(self) -> int:
        return len(self.parent.tables)

    def table(self, device):
        return torch.tensor(self.parent.tables, device=device)  # (B,pages)

    def gather(self, pages):
        """Dense (B,Hk,S,D): every page of every row, copied."""
        used = self.table(pages.device)[:, : -(-self.length // self.parent.pool.page_size)]  # (B,n)
        dense = pages[self.layer][used].transpose(1, 2)  # (B,n,Hk,page,D) → (B,Hk,n,page,D)
        return dense.flatten(2, 3)[:, :, : self.length]  # (B,Hk,S,D)

    def truncate(self, n: int):
        self.length = min(n, self.length)

    def state(self) -> dict:
        if not self.length:
            return {}
        return {"key": self.gather(self.parent.pool.keys), "value": self.gather(self.parent.pool.values)}

    def restore(self, state: dict):
        self.length = 0
        if state:
            self.parent.resize(state["key"].shape[0])
            self.append(state["key"], state["value"])

    @property
    def nbytes(self) -> int:
        return self.parent.nbytes // len(self.parent)
