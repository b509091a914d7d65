/* One step of a whole decoder over paged keys and values: what the caller fills in. Mirrored field by field in compiled.py. */
#ifndef LAYA_STEP_H
#define LAYA_STEP_H

#include <stdint.h>

#include "linear.h"

typedef struct {
    /* float32. Norms of the stream have sqrt(hidden) in them; qk_norm is [(heads + kv_heads) * head_dim]; null: there is none. */
    const float *attn_norm, *mlp_norm, *post_attn_norm, *post_mlp_norm, *qk_norm, *qkv_bias;
    const float *rotary;  /* [positions][head_dim / 2] pairs (cos, sin) */
    uint16_t *pool;       /* bf16 [slots][2 * kv_heads][head_dim]: keys of all heads, then values */
    int64_t window;       /* positions seen, its own included; 0: all */
    Linear qkv, o, gate_up, down;
} Layer;

typedef struct {
    int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, block_size, gelu;
    double eps, scale;
    const Layer *layer;
    const float *final_norm;
    Linear head; /* rows 0: the caller has another way to the logits */
} Model;

/* `rows` tokens. Row i is at positions[i], its key goes to slots[i], and it sees the blocks at tables + table_of[i].
 * `apart`: no row sees another's key of this step. */
typedef struct {
    int64_t rows, stream_stride, apart, threads;
    float *stream; /* float32 [rows][stream_stride]: embeddings in, the residual after the last layer out */
    const int32_t *positions, *slots, *tables, *table_of;
    uint8_t *scratch; /* laya_scratch_bytes, 64-byte aligned */
    int64_t *spent;   /* nanoseconds of products, attention and the rest are added here; null: not measured */
} Step;

int64_t laya_scratch_bytes(const Model *model, int64_t rows, int64_t threads);
void laya_step(const Model *model, const Step *step);

/* logits[i][0..vocab) of `step->rows` rows of a stream; uses rows, stream, stream_stride, threads and scratch. */
void laya_logits(const Model *model, const Step *step, float *logits);

/* attention.c */
void turn_heads(const Model *model, const Layer *layer, const Step *step, float *qkv, int64_t row, int64_t kv_head);
void attend(const Model *model, const Layer *layer, const Step *step, const float *qkv, float *seen, int64_t row, int64_t kv_head);

#endif
