"""What tests of the engine compare with: an answer made alone, and a pool in which nothing is left."""

import nanokv


def alone(model, ids, **options) -> list[int]:
    return list(nanokv.generate(model, ids, **options))


def all_free(engine) -> bool:
    """Nobody but the index holds a page, and what it holds can be taken."""
    pool = engine.pool
    indexed = set(pool.index.pages())
    assert all(count == (page in indexed) for page, count in enumerate(pool.references))
    taken = pool.take(len(pool.references))
    pool.release(taken)
    return not pool.index and len(pool.free) == len(pool.references)
