/* Rotary embedding, the write of keys and values, and attention of one row and key head over its blocks, 16 positions at a time
 * from the pool's bf16. Groups of 16 begin at multiples of 16, so a row's numbers do not depend on how its prompt was cut. */
#include "step.h"
#include "vectors.h"

#include <math.h>

#define GROUP_HEADS 4    /* query heads that share a reading of keys and values in registers */
#define LARGEST_HEAD 256

static float *heads_of(float *row, int64_t head, int64_t dim) { return row + head * dim; }

static void head_norm(float *x, const float *weight, int64_t dim, double eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += LANES) squares = _mm512_fmadd_ps(_mm512_loadu_ps(x + d), _mm512_loadu_ps(x + d), squares);
    __m512 factor = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + (float)eps));
    for (int64_t d = 0; d < dim; d += LANES)
        _mm512_storeu_ps(x + d, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + d), factor), _mm512_loadu_ps(weight + d)));
}

/* Neighbours are the parts of a complex number, multiplied by the position's. */
INLINE __m512 turned(const float *x, const float *rotary) {
    __m512 number = _mm512_loadu_ps(x), angle = _mm512_loadu_ps(rotary);
    __m512 swapped = _mm512_permute_ps(number, 0xb1);
    return _mm512_fmaddsub_ps(number, _mm512_moveldup_ps(angle), _mm512_mul_ps(swapped, _mm512_movehdup_ps(angle)));
}

void turn_heads(const Model *model, const Layer *layer, const Step *step, float *qkv, int64_t row, int64_t kv_head) {
    int64_t dim = model->head_dim, group = model->heads / model->kv_heads;
    float *own = qkv + row * (model->heads + 2 * model->kv_heads) * dim;
    const float *rotary = layer->rotary + step->positions[row] * dim;
    uint16_t *slot = layer->pool + (int64_t)step->slots[row] * 2 * model->kv_heads * dim;
    __m512 scale = _mm512_set1_ps((float)model->scale);
    for (int64_t i = 0; i <= group; i++) {
        int64_t head = i < group ? kv_head * group + i : model->heads + kv_head;
        float *x = heads_of(own, head, dim);
        if (layer->qk_norm) head_norm(x, layer->qk_norm + head * dim, dim, model->eps);
        for (int64_t d = 0; d < dim; d += LANES) {
            __m512 number = turned(x + d, rotary + d);
            if (i < group)
                _mm512_storeu_ps(x + d, _mm512_mul_ps(number, scale));
            else
                to_bf16(slot + kv_head * dim + d, number);
        }
    }
    const float *value = heads_of(own, model->heads + model->kv_heads + kv_head, dim);
    for (int64_t d = 0; d < dim; d += LANES)
        to_bf16(slot + (model->kv_heads + kv_head) * dim + d, _mm512_loadu_ps(value + d));
}

/* Lane i of the result is the sum of v[i]'s lanes. */
INLINE __m512 sums_of(const __m512 v[LANES]) {
    __m512 quad[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 *a = v + 4 * i;
        __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        __m512d f = _mm512_castps_pd(first), s = _mm512_castps_pd(second);
        quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(f, s)), _mm512_castpd_ps(_mm512_unpackhi_pd(f, s)));
    }
    __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

typedef struct {
    float peak[GROUP_HEADS], total[GROUP_HEADS];
    float out[GROUP_HEADS][LARGEST_HEAD];
} Seen;

/* Positions [first, last) of 16 that begin at `kv`, for `heads` query heads at `q`. */
INLINE void sixteen(int heads, int64_t dim, const float *q, const uint16_t *kv, int64_t stride, int64_t values, int first, int last,
                    Seen *seen) {
    __m512 products[GROUP_HEADS][LANES];
    for (int t = 0; t < LANES; t++) {
        __m512 acc[GROUP_HEADS];
        for (int g = 0; g < heads; g++) acc[g] = _mm512_setzero_ps();
        if (t >= first && t < last)
            for (int64_t d = 0; d < dim; d += LANES) {
                __m512 key = from_bf16(kv + t * stride + d);
#pragma GCC unroll 4
                for (int g = 0; g < heads; g++) acc[g] = _mm512_fmadd_ps(key, _mm512_loadu_ps(q + g * dim + d), acc[g]);
            }
        for (int g = 0; g < heads; g++) products[g][t] = acc[g];
    }
    __mmask16 there = (__mmask16)(((1u << last) - 1) & ~((1u << first) - 1));
    float weights[GROUP_HEADS][LANES], kept[GROUP_HEADS];
    for (int g = 0; g < heads; g++) {
        __m512 scores = sums_of(products[g]);
        float highest = _mm512_mask_reduce_max_ps(there, scores);
        float peak = seen->peak[g] > highest ? seen->peak[g] : highest;
        __m512 weight = _mm512_maskz_mov_ps(there, exp16(_mm512_sub_ps(scores, _mm512_set1_ps(peak))));
        kept[g] = _mm512_cvtss_f32(exp16(_mm512_set1_ps(seen->peak[g] - peak)));
        seen->total[g] = seen->total[g] * kept[g] + _mm512_reduce_add_ps(weight);
        seen->peak[g] = peak;
        _mm512_storeu_ps(weights[g], weight);
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        __m512 acc[GROUP_HEADS];
        for (int g = 0; g < heads; g++) acc[g] = _mm512_mul_ps(_mm512_loadu_ps(seen->out[g] + d), _mm512_set1_ps(kept[g]));
        for (int t = first; t < last; t++) {
            __m512 value = from_bf16(kv + values + t * stride + d);
#pragma GCC unroll 4
            for (int g = 0; g < heads; g++) acc[g] = _mm512_fmadd_ps(value, _mm512_set1_ps(weights[g][t]), acc[g]);
        }
        for (int g = 0; g < heads; g++) _mm512_storeu_ps(seen->out[g] + d, acc[g]);
    }
}

/* The next 16 positions are asked for while these are computed: they lie apart, and in a block that only the table knows. */
INLINE void ask(const uint16_t *kv, int64_t dim, int64_t stride, int64_t values) {
    for (int t = 0; t < LANES; t++)
        for (int64_t d = 0; d < dim; d += 32) {
            _mm_prefetch((const char *)(kv + t * stride + d), _MM_HINT_T0);
            _mm_prefetch((const char *)(kv + values + t * stride + d), _MM_HINT_T0);
        }
}

INLINE void some_heads(int heads, const Model *model, const Layer *layer, const int32_t *table, int64_t position, const float *q,
                       int64_t kv_head, float *out) {
    int64_t dim = model->head_dim, stride = 2 * model->kv_heads * dim, size = model->block_size;
    int64_t begin = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0;
    Seen seen;
    for (int g = 0; g < heads; g++) {
        seen.peak[g] = -INFINITY, seen.total[g] = 0;
        for (int64_t d = 0; d < dim; d += LANES) _mm512_storeu_ps(seen.out[g] + d, _mm512_setzero_ps());
    }
    for (int64_t at = begin / LANES * LANES; at <= position; at += LANES) {
        const uint16_t *kv = layer->pool + (table[at / size] * size + at % size) * stride + kv_head * dim;
        int64_t then = at + LANES <= position ? at + LANES : at;
        ask(layer->pool + (table[then / size] * size + then % size) * stride + kv_head * dim, dim, stride, model->kv_heads * dim);
        int first = begin > at ? (int)(begin - at) : 0, last = position - at < LANES ? (int)(position - at) + 1 : LANES;
        sixteen(heads, dim, q, kv, stride, model->kv_heads * dim, first, last, &seen);
    }
    for (int g = 0; g < heads; g++) {
        __m512 part = _mm512_set1_ps(1.0f / seen.total[g]);
        for (int64_t d = 0; d < dim; d += LANES)
            _mm512_storeu_ps(out + g * dim + d, _mm512_mul_ps(_mm512_loadu_ps(seen.out[g] + d), part));
    }
}

void attend(const Model *model, const Layer *layer, const Step *step, const float *qkv, float *seen, int64_t row, int64_t kv_head) {
    int64_t dim = model->head_dim, group = model->heads / model->kv_heads;
    const float *q = qkv + row * (model->heads + 2 * model->kv_heads) * dim + kv_head * group * dim;
    float *out = seen + row * model->heads * dim + kv_head * group * dim;
    const int32_t *table = step->tables + step->table_of[row];
    int64_t position = step->positions[row];
    while (group > 0) {
        int64_t heads = group < GROUP_HEADS ? group : GROUP_HEADS;
        switch (heads) {
#define CASE(n) \
    case n: some_heads(n, model, layer, table, position, q, kv_head, out); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
        group -= heads, q += heads * dim, out += heads * dim;
    }
}
