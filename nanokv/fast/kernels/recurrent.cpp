// A decode step of a recurrent layer in C++: the gated delta rule of nanokv/recurrent.py.
//
// A step reads and writes the whole state S and little else, so its limit is twice the bytes of S
// over the memory bandwidth. torch's operators move 12 times those bytes instead of twice.
//
//     S (Dk,Dv) of one head · Dk, Dv width of a key and of a value

#include "vectors.h"

// Rows i … i+ROWS−1 of S: found += Sᵀk, y += Sᵀq.
template <int ROWS>
static inline void read_rows(const float* S, const float* k, const float* q, int64_t Dv, float* found, float* y) {
    float key[ROWS], query[ROWS];  // copies: the compiler cannot know that found and y do not overlap k and q
    for (int r = 0; r < ROWS; r++) key[r] = k[r], query[r] = q[r];
    int64_t j = 0;
    for (; j + 16 <= Dv; j += 16) {
        f32x16 at_key = load16(found + j), at_query = load16(y + j);
        for (int r = 0; r < ROWS; r++) {
            f32x16 row = load16(S + r * Dv + j);
            at_key += key[r] * row;
            at_query += query[r] * row;
        }
        store16(found + j, at_key);
        store16(y + j, at_query);
    }
    for (; j < Dv; j++)
        for (int r = 0; r < ROWS; r++) found[j] += key[r] * S[r * Dv + j], y[j] += query[r] * S[r * Dv + j];
}

// One token through one head. The outputs need only the old S:
//
//     δ = beta (v − e^g Sᵀk)    y = e^g Sᵀq + (q·k) δ    S ← e^g S + k δᵀ
//
// The first loop reads S from memory, in the order of its addresses. The second writes it: 64 KB
// (128 × 128) are still in the L2 cache. Meanwhile it fetches the S of the next head into that
// cache, which saves a fifth of the time. A prefetch for writing saves less.
static void delta_head(const float* q, const float* k, const float* v, float g, float beta, const float* S, float* to,
                       const float* next, int64_t Dk, int64_t Dv, float* delta, float* y) {
    const int ROWS = 4;
    for (int64_t j = 0; j < Dv; j++) delta[j] = y[j] = 0;
    int64_t i = 0;
    for (; i + ROWS <= Dk; i += ROWS) read_rows<ROWS>(S + i * Dv, k + i, q + i, Dv, delta, y);
    for (; i < Dk; i++) read_rows<1>(S + i * Dv, k + i, q + i, Dv, delta, y);
    float keep = expf(g), overlap = 0;
    for (i = 0; i < Dk; i++) overlap += q[i] * k[i];
    for (int64_t j = 0; j < Dv; j++) {
        delta[j] = beta * (v[j] - keep * delta[j]);
        y[j] = keep * y[j] + overlap * delta[j];
    }
    for (i = 0; i < Dk; i++) {
        const float* row = S + i * Dv;
        float *out = to + i * Dv, key = k[i];
        int64_t j = 0;
        for (; j + 16 <= Dv; j += 16) {
            __builtin_prefetch(next + i * Dv + j, 0, 2);
            store16(out + j, keep * load16(row + j) + key * load16(delta + j));
        }
        for (; j < Dv; j++) out[j] = keep * row[j] + key * delta[j];
    }
}

extern "C" {

// One token per row: q, k (n,Dk), v (n,Dv), g, beta (n,), S (n,Dk,Dv) → y (n,Dv), and the state
// after the token in `to`, which may be S. n = B·H heads.
void gated_delta_step(float* y, const float* q, const float* k, const float* v, const float* g, const float* beta,
                      const float* S, float* to, int64_t n, int64_t Dk, int64_t Dv) {
    Timer timer(ATTENTION);
#pragma omp parallel if (4 * n * Dk * Dv >= WORTH)
    {
        std::vector<float> delta(Dv);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            const float *head = S + i * Dk * Dv, *next = i + 1 < n ? head + Dk * Dv : head;
            delta_head(q + i * Dk, k + i * Dk, v + i * Dv, g[i], beta[i], head, to + i * Dk * Dv, next, Dk, Dv, delta.data(),
                       y + i * Dv);
        }
    }
}

}  // extern "C"
