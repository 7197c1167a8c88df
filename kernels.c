// The CPU members of kernels.py, which builds this file at first use and says in its section 8 what
// it is about: read that first. Contents: numbers, the team, elementwise, the inner loop of every
// matrix product, linear layers, attention, and `run`, the only entry.
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif
// Floats in a register, and rows of one pass of `tile`: 8 x 2 sums and 2 panel vectors fit into 32
// registers of 16, and 2 x 4 sums into 16 registers of 8.
#if defined __AVX512F__
enum { LANES = 16, ROWS = 8 };
#elif defined __AVX__
enum { LANES = 8, ROWS = 2 };
#else
enum { LANES = 4, ROWS = 2 };
#endif
enum { NC = 32, CHUNK = 128 };  // columns of a panel, positions of a piece of context
// ---- numbers ------------------------------------------------------------------------------------
// Every operator exists for fp32 and bf16. `bf` is a constant in each copy: INLINE functions are
// always inlined, so `if (bf)` leaves no branch in the machine code. A vector has 16 floats; a CPU
// with narrower registers uses several for each. Matrices are row-major, strides in elements.
// `kv` is the format of the cache, which may be narrower; `bf` is a format too, FP32 or BF16.
#define INLINE static inline __attribute__((always_inline))
#define OUTLINE static __attribute__((noinline))  // long, seldom called: one copy compiles sooner
enum { FP32, BF16, INT8, E4M3, E5M2 };
typedef float f32s __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32s __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32s __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16s __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t halves __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint8_t u8s __attribute__((vector_size(16), aligned(1), may_alias));
typedef float f32n __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t i32n __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t u32n __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t word __attribute__((aligned(2), may_alias));  // one fp32, or two bf16
#define LINES __attribute__((aligned(64)))  // at the beginning of a cache line
INLINE long size_of(int kv) { return kv == FP32 ? 4 : kv == BF16 ? 2 : 1; }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }
INLINE long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }
INLINE f32s splat(float x) { return x - (f32s){}; }
INLINE u32s splat_word(uint32_t x) { return x - (u32s){}; }
INLINE f32s where(i32s m, f32s yes, f32s no) { return (f32s)(((i32s)yes & m) | ((i32s)no & ~m)); }
INLINE f32s larger(f32s a, f32s b) {  // b when either is NaN
#ifdef __AVX512F__  // one instruction; of the line below gcc 12 makes three
  return (f32s)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return where(a > b, a, b);
#endif
}
INLINE f32s smaller(f32s a, f32s b) {  // b when either is NaN
#ifdef __AVX512F__
  return (f32s)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return where(a < b, a, b);
#endif
}
// A bf16 is the upper half of an fp32. Rounding to nearest even adds 0x7fff, and one more if the
// part that is kept is odd. A NaN is kept apart, or the addition could turn it into infinity.
INLINE u32s round_bf16(f32s x) {
  u32s u = (u32s)x, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (u32s)where(x == x, (f32s)rounded, (f32s)splat_word(0x7fc0));
}
// Numbers of one byte (OCP 8-bit floats: sign, exponent, 3 or 2 bits of mantissa), the lowest of w.
// The bits move to where fp32 has them, and the bias is corrected. Exponent 0 means that there is
// no leading 1: doubling n and taking the smallest normal number away gives what was meant. Masks
// are made by shifts: of a comparison gcc 12 makes scalar code for AVX2.
INLINE f32s from_byte(int kv, u32s w) {
  if (kv == INT8) return __builtin_convertvector((i32s)(w << 24) >> 24, f32s);
  u32s bits = (w & 0x7f) << (kv == E4M3 ? 20 : 21);
  i32s tiny = (i32s)(bits - 0x800000) >> 31;
  u32s special = (u32s)((i32s)((kv == E4M3 ? 0x07e00000 : 0x0f600000) - bits) >> 31) & 0x7f800000;
  f32s n = (f32s)(bits + ((kv == E4M3 ? 120u : 112u) << 23));
  n = where(tiny, 2.f * n - (kv == E4M3 ? 0x1p-6f : 0x1p-14f), n);
  return (f32s)((u32s)n | special | (w & 0x80) << 24);
}
// Rounds to nearest even and saturates: by adding to the bits, as in round_bf16, or where the
// exponent becomes 0 by adding a float whose last bit is worth as much as theirs. NaN is 0x7f.
INLINE u32s to_byte(int kv, f32s x) {
  if (kv == INT8) return (u32s)__builtin_convertvector(x + 12582912.f - 12582912.f, i32s);
  int cut = kv == E4M3 ? 20 : 21;
  f32s top = splat(kv == E4M3 ? 448.f : 57344.f), magic = splat(kv == E4M3 ? 0x1p14f : 0x1p7f);
  f32s n = (f32s)((u32s)x & 0x7fffffffu);
  n = where(n > top, top, n);
  u32s normal = (u32s)n + ((1u << (cut - 1)) - 1) + (((u32s)n >> cut) & 1);
  normal = (normal >> cut) - ((kv == E4M3 ? 120u : 112u) << (23 - cut));
  u32s small = (u32s)(n + magic) - (u32s)magic;
  f32s code = where(n < (kv == E4M3 ? 0x1p-6f : 0x1p-14f), (f32s)small, (f32s)normal);
  return (u32s)where(x == x, code, (f32s)splat_word(0x7f)) | ((u32s)x >> 24 & 0x80);
}
INLINE u32s load_halves(const char *p) {  // 16 numbers of 2 bytes
#if defined(__AVX512F__)  // gcc 12 makes four instructions of the conversion below
  return (u32s)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
#elif defined(__AVX2__)  // and here 32
  u32s x;
  for (int i = 0; i < 2; i++)
    ((__m256i *)&x)[i] = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p + 16 * i)));
  return x;
#else
  return __builtin_convertvector(*(const u16s *)p, u32s);
#endif
}
INLINE f32s load16(int kv, const char *p) {
  if (kv == FP32) return *(const f32s *)p;
  if (kv == BF16) return (f32s)(load_halves(p) << 16);
#ifdef __AVX512F__
  if (kv == INT8)
    return (f32s)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#endif
  return from_byte(kv, __builtin_convertvector(*(const u8s *)p, u32s));
}
INLINE void store16(int kv, char *p, f32s x) {
  if (kv == FP32) { *(f32s *)p = x; return; }
  if (kv > BF16) { *(u8s *)p = __builtin_convertvector(to_byte(kv, x) & 0xff, u8s); return; }
#ifdef __AVX512BF16__  // the same rounding in one instruction; numbers below 2^-126 become 0
  __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &half, 32);
#else
  *(u16s *)p = __builtin_convertvector(round_bf16(x), u16s);
#endif
}
INLINE void store32(int bf, char *p, f32s x, f32s y) {
#ifdef __AVX512BF16__  // one write of a cache line
  __m512bh both = _mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
  if (bf) { memcpy(p, &both, 64); return; }
#endif
  store16(bf, p, x);
  store16(bf, p + 16 * size_of(bf), y);
}
// Elements i..i+15 of a row of n: lanes past the end read as 0 and are not written.
INLINE f32s get(int bf, const char *row, long i, long n) {
  row += i * size_of(bf);
  if (n - i >= 16) return load16(bf, row);
  char part[64] = {0};
  memcpy(part, row, (n - i) * size_of(bf));
  return load16(bf, part);
}
INLINE void put(int kv, char *row, long i, long n, f32s x) {
  row += i * size_of(kv);
  if (n - i >= 16) { store16(kv, row, x); return; }
  char part[64];
  store16(kv, part, x);
  memcpy(row, part, (n - i) * size_of(kv));
}
OUTLINE u32s last_words(const char *p, long bytes) {
  char part[64] = {0};
  if (bytes > 0) memcpy(part, p, bytes);
  return *(const u32s *)part;
}
// 64 bytes of a row that has `bytes` left, then zeros.
INLINE u32s words(const char *p, long bytes) {
  return bytes >= 64 ? *(const u32s *)p : last_words(p, bytes);
}
// The lanes of v in another order, and lanes of two vectors picked into one.
#define PICK(v, w, ...) __builtin_shufflevector(v, w, __VA_ARGS__)
// Sum or maximum of 16 lanes, always folded in the same order: 16 -> 8 -> 4 -> 2 -> 1.
#define FOLD(v, OP) \
  v = OP(v, PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  v = OP(v, PICK(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
  v = OP(v, PICK(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
  v = OP(v, PICK(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#define PLUS(a, b) ((a) + (b))
INLINE float lanes_sum(f32s v) { FOLD(v, PLUS); return v[0]; }
INLINE float lanes_max(f32s v) { FOLD(v, larger); return v[0]; }
// 2^y = 2^n 2^r with |r| <= 1/2: a polynomial for 2^r, and n written into the exponent bits. Its
// relative error is 2e-7, or 1e-4 in the short form. Below y = -126.5, where n is -127 and these
// bits are 0, the result is exactly 0, so that a masked score has exactly no weight. NaN stays.
INLINE f32s power_of_2(int brief, f32s y) {  // y < 127.5
  y = larger(splat(-127.f), y);
  f32s bits = y + (12582912.f + 127);  // 1.5 * 2^23: the last bit is worth 1
  f32s r = y - (bits - (12582912.f + 127));
  f32s p = brief ? 1.f + r * (0.69328293f + r * (0.24221097f + r * 0.05500893f))
                 : 1.f + r * (0.693146884f + r * (0.24022238f + r * (0.0555089302f
                       + r * (0.00967169832f + r * 0.00132186722f))));
  return p * (f32s)((u32s)bits << 23);
}
INLINE f32s power16(f32s y) { return power_of_2(0, smaller(splat(127.f), y)); }
static const float LOG2E = 1.44269504f;  // e^x = 2^(x log2 e)
// ---- the team -----------------------------------------------------------------------------------
// All threads run one operator; each takes the next ticket until none is left. A thread that wakes
// late (sleeping threads need 50 us) or has to share its core just takes fewer.
typedef struct { atomic_long ticket; atomic_int waiting, turn; float *shared; } Team;
INLINE long next(Team *t) { return atomic_fetch_add(&t->ticket, 1); }
static void barrier(Team *t) {
  int size = omp_get_num_threads(), turn = atomic_load(&t->turn);
  if (atomic_fetch_add(&t->waiting, 1) == size - 1) {
    atomic_store(&t->ticket, 0);
    atomic_store(&t->waiting, 0);
    atomic_store(&t->turn, turn + 1);
  } else {
    // About 50 us. Who yields to another program gets the core back after milliseconds: with one
    // program besides, a decode step was 6 times slower when threads yielded after 2 us, now 2.4.
    for (long spins = 0; atomic_load(&t->turn) == turn; spins++) if (spins > 60000) sched_yield();
  }
}
// Working memory: growing buffers of each thread, kept between calls. Callers do not meet.
typedef struct { char *p; size_t size; } Buffer;
static _Thread_local Buffer own, common, list;
static char *room(Buffer *b, size_t size) {
  if (size > b->size) {
    free(b->p);
    b->size = round_up(size * 5 / 4, 64);
    b->p = aligned_alloc(64, b->size);
  }
  return b->p;
}
// for (m = each row of M), rows of `width` elements dealt out in blocks that take some microseconds
#define EACH_ROW(m, M, width) \
  for (long b_, n_ = 1 + 16384 / (width); (b_ = next(t) * n_) < (M);) \
    for (long m = b_; m < least(M, b_ + n_); m++)
// ---- elementwise --------------------------------------------------------------------------------
// Row m of x starts at m / inner * ldx + m % inner * E: heads that lie inside qkv need no copy. So
// does row m of out, with ldo; it may be x. The residual is fp32: x is added to it in place, and
// the norm of the sum is what comes out.
INLINE void rms_norm(int bf, Team *t, const char *x, const char *w, char *residual, char *out,
                     long M, long inner, long E, long ldx, long ldo, int wbf, float eps) {
  long z = size_of(bf);
  EACH_ROW(m, M, E) {
    const char *row = x + (m / inner * ldx + m % inner * E) * z;
    char *res = residual ? residual + m * E * 4 : 0;
    char *to = out + (m / inner * ldo + m % inner * E) * z;
    f32s sum = {};
    for (long i = 0; i < E; i += 16) {
      f32s v = get(bf, row, i, E);
      if (res) { v += get(0, res, i, E); put(0, res, i, E, v); }
      sum += v * v;
    }
    float scale = 1.f / sqrtf(lanes_sum(sum) / E + eps);
    for (long i = 0; i < E; i += 16) {
      f32s v = res ? get(0, res, i, E) : get(bf, row, i, E);
      put(bf, to, i, E, v * scale * get(wbf, w, i, E));
    }
  }
}
INLINE f32s silu16(f32s x) { return x / (1.f + power16(-x * LOG2E)); }
INLINE void silu_mul(int bf, Team *t, const char *x, char *out, long T, long F, long ldx) {
  long z = size_of(bf);
  EACH_ROW(m, T, F) for (long i = 0; i < F; i += 16) {
    const char *gate = x + m * ldx * z, *up = gate + F * z;
    put(bf, out + m * F * z, i, F, silu16(get(bf, gate, i, F)) * get(bf, up, i, F));
  }
}
// Turns one head: coordinates i and i + half, or 2i and 2i+1 when interleaved, by the angle of i.
INLINE void rotate(int bf, char *head, const float *cos_sin, long half, int interleaved) {
  const char *c = (const char *)cos_sin, *s = (const char *)(cos_sin + half);
  char *high = head + half * size_of(bf);
  for (long i = 0; !interleaved && i < half; i += 16) {
    f32s co = get(0, c, i, half), si = get(0, s, i, half);
    f32s a = get(bf, head, i, half), b = get(bf, high, i, half);
    put(bf, head, i, half, a * co - b * si);
    put(bf, high, i, half, b * co + a * si);
  }
  for (long i = 0; interleaved && i < half; i++) {
    float co = cos_sin[i], si = cos_sin[half + i];
    f32s v = get(bf, head, 2 * i, 2 * i + 2);
    v = (f32s){v[0] * co - v[1] * si, v[1] * co + v[0] * si};
    put(bf, head, 2 * i, 2 * i + 2, v);
  }
}
// The cache by its strides: plane (K, V), block, slot in the block, head. What is stored has been
// divided by a scale: one for all keys and one for all values, or, in an int8 cache, one for each
// token and head, which lie in `scales` (2, NB, BS, KH).
typedef struct {
  char *data; long plane, block, token, head, BS; int kv; float *scales; float k_scale, v_scale;
} Cache;
// One head of a token, D numbers. own_scale: where its scale goes, if it has one to itself.
OUTLINE void store_head(int bf, int kv, const char *x, char *to, long D, float scale,
                        float *own_scale) {
  if (kv == bf) { memcpy(to, x, D * size_of(bf)); return; }
  f32s top = splat(1e-8f * 127), not_finite = {};
  for (long i = 0; own_scale && i < D; i += 16) {
    f32s v = get(bf, x, i, D);
    top = larger((f32s)((u32s)v & 0x7fffffffu), top);
    not_finite += v * 0.f;  // NaN, and the scale with it, if a number is infinite or NaN
  }
  if (own_scale) *own_scale = scale = lanes_max(top) / 127 + lanes_sum(not_finite);
  for (long i = 0; i < D; i += 16) put(kv, to, i, D, get(bf, x, i, D) / scale);
}
INLINE void rope_store(int bf, Team *t, char *qkv, const float *cos_sin, const char *positions,
                       int wide, const int64_t *slots, Cache c, long T, long H, long KH, long D,
                       long ldx, long rotary, int interleaved) {
  long z = size_of(bf);
  EACH_ROW(i, T, ldx) {
    long pos = wide ? ((const int64_t *)positions)[i] : ((const int32_t *)positions)[i];
    char *row = qkv + i * ldx * z, *k = row + H * D * z;
    long to = slots[i] / c.BS * c.block + slots[i] % c.BS * c.token, y = size_of(c.kv);
    for (long b = 0; slots[i] >= 0 && b < KH * D * y; b += 64)  // while q and k are turned
      for (long plane = 0; plane < 2; plane++)
        __builtin_prefetch(c.data + (to + plane * c.plane) * y + b, 1);
    for (long h = 0; h < H + KH; h++)
      rotate(bf, row + h * D * z, cos_sin + pos * rotary, rotary / 2, interleaved);
    for (long h = 0; slots[i] >= 0 && h < 2 * KH; h++) {  // the keys of all heads, then the values
      long at = to + h / KH * c.plane + h % KH * c.head;
      store_head(bf, c.kv, k + h * D * z, c.data + at * y, D,
                 h < KH ? c.k_scale : c.v_scale, c.scales ? c.scales + at / D : 0);
    }
  }
}
// The largest of each block of 1024 first, then where the first of the best blocks has it.
INLINE void argmax(int bf, Team *t, const char *x, int64_t *out, long S, long V, long ldx) {
  for (long m; (m = next(t)) < S;) {
    const char *row = x + m * ldx * size_of(bf);
    float best = -INFINITY;
    long at = 0;
    for (long b = 0; b < V; b += 1024) {
      f32s top = splat(-INFINITY);
      long end = least(V, b + 1024), i = b;
      for (; i + 16 <= end; i += 16) top = larger(load16(bf, row + i * size_of(bf)), top);
      for (; i < end; i++) top = larger(splat(get(bf, row, i, i + 1)[0]), top);
      float largest = lanes_max(top);
      if (largest > best) { best = largest; at = b; }
    }
    while (at < V && get(bf, row, at, at + 1)[0] != best) at++;
    out[m] = at < V ? at : 0;  // a row of NaN has no largest element
  }
}
// ---- the inner loop of every matrix product -----------------------------------------------------
// c[R][32] = x[R][K] @ panel, where a panel holds 32 columns of the right-hand matrix k by k:
//     fp32  [K][32]        k=0: columns 0..31 | k=1: columns 0..31 | ..
//     bf16  [K/2][32][2]   two consecutive k of a column side by side, as the dot instruction wants
// The panel is one stream of memory, read once. A product with one row (a GEMV) is nothing but that
// stream: two flops per weight, while a core could do a hundred until the next one arrives. Up to 8
// rows use a panel vector from its register. c sums over k in the same order for every R.
// The registers of this loop are written as such (u32n): of a vector that needs two, gcc 12 keeps
// the sums in memory.
INLINE f32n dot2(f32n acc, u32n w, u32n x) {
#ifdef __AVX512BF16__  // 32 multiply-adds in one instruction, which no compiler finds by itself
  return (f32n)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
  acc += (f32n)(w << 16) * (f32n)(x << 16);
  return acc + (f32n)(w & 0xffff0000u) * (f32n)(x & 0xffff0000u);
#endif
}
// Integers, for int8 weights times int8 activations. VNNI: four unsigned times four signed bytes in
// a lane, added to an int32. Other CPUs: two 16-bit numbers in a lane. Both are exact.
#if defined __AVX512VNNI__ || defined __AVXVNNI__
enum { BYTES = 4 };  // integers in a word
typedef int8_t integers __attribute__((vector_size(16)));
#else
enum { BYTES = 2 };
typedef int16_t integers __attribute__((vector_size(32)));
#endif
INLINE i32n dot_bytes(i32n acc, u32n w, u32n x) {
#if defined __AVX512VNNI__
  return (i32n)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined __AVXVNNI__
  return (i32n)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#elif defined __AVX512BW__
  return acc + (i32n)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined __AVX2__  // gcc 12 multiplies 32-bit numbers, which takes eight instructions
  return acc + (i32n)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
  acc += ((i32n)(w << 16) >> 16) * ((i32n)(x << 16) >> 16);
  return acc + ((i32n)w >> 16) * ((i32n)x >> 16);
#endif
}
// The type of a word: fp32, two bf16, or int8: as many as a multiply-add takes.
INLINE long in_word(int type) { return type == INT8 ? BYTES : 1 + type; }
INLINE f32n multiply_add(int type, f32n acc, u32n w, const char *x) {  // x: a word for all lanes
  u32n b = *(const word *)x - (u32n){};
  if (type == INT8) return (f32n)dot_bytes((i32n)acc, w, b);
  if (type == BF16) return dot2(acc, w, b);
  return acc + (f32n)w * (f32n)b;
}
enum { PARTS = NC / LANES };  // registers that hold one word of every column
INLINE void tile(int type, int R, const char *panel, const char *x, long ldx, long K,
                 f32n c[ROWS][PARTS]) {
  f32n a[R][PARTS];
  for (int r = 0; r < R; r++) for (int j = 0; j < PARTS; j++) a[r][j] = (f32n){};
  for (long k = 0; k < K / in_word(type); k++, panel += 128, x += 4)
    for (int j = 0; j < PARTS; j++) {
      u32n w = ((const u32n *)panel)[j];
      for (int r = 0; r < R; r++)
        a[r][j] = multiply_add(type, a[r][j], w, x + r * ldx * 4 / in_word(type));
    }
  for (int r = 0; r < R; r++) for (int j = 0; j < PARTS; j++) c[r][j] = a[r][j];
}
// f(R, ..) with R = least(rows, ROWS) as a constant: one copy of the code for each row count.
#define ONE(n, f, ...) case n: if (n <= ROWS) f((n <= ROWS ? n : ROWS), __VA_ARGS__); break;
#define WITH_R(rows, f, ...) switch (least(rows, ROWS)) { \
  ONE(1, f, __VA_ARGS__) ONE(2, f, __VA_ARGS__) ONE(3, f, __VA_ARGS__) ONE(4, f, __VA_ARGS__) \
  ONE(5, f, __VA_ARGS__) ONE(6, f, __VA_ARGS__) ONE(7, f, __VA_ARGS__) ONE(8, f, __VA_ARGS__) }
// ---- the matrix unit ----------------------------------------------------------------------------
// AMX has an instruction that does 16 times the work of the one in `tile`: C += A B, each a
// *tile*, a register of 16 rows of 64 bytes.
//     A  16 rows of x, 64 bytes of k (a *step*)     B  16 words of k, of 16 columns: half a panel,
//     C  16 x 16 sums                                  whose words are the rows, as it lies
// So weights need no layout of their own; x is copied into tiles once per product, [rows / 16]
// [steps][parts][16 rows][64 bytes], which also pads k with zeros. Below are 2 x 2 tiles C, where
// each A and each B serves twice, and 1 x 4. Rows past the last hold anything: a row of C has its
// own row of A. The order of sums is not that of `tile`: of the 32 k of a step the even and the odd
// ones are added up apart, and the sum of both is added to C. So tiles multiply every row count,
// down to one: there the time goes into reading the weights, and rows keep their bits.
enum { A_TILE = 1024, PAIR_ROWS = 32 };
#if defined __AMX_BF16__ && defined __AMX_INT8__ && defined __linux__
static int tiles;  // may this process use them?
__attribute__((constructor)) static void ask_for_tiles(void) {  // Linux keeps 8 KB more per thread
  tiles = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}
// Tiles 0 to 3 are sums, 6 is a left factor. With few rows it is multiplied faster, and they have
// as many rows; with `cache`, 0 and 1 have 16 nevertheless. Tiles know no numbers below 2^-126:
// until `end_tiles`, which takes the mode that this returns, other arithmetic does not either.
static unsigned begin_tiles(long rows, int cache) {
  struct { uint8_t palette, zeros[15]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {1};
  for (int i = 0; i < 8; i++) {
    shape.bytes[i] = 64;
    int all = i == 4 || i == 5 || i == 7 || (cache && i < 2);
    shape.rows[i] = all ? 16 : least(rows, 16);
  }
  __asm__ volatile("" ::: "memory");  // the intrinsics do not say what memory they read
  _tile_loadconfig(&shape);
  unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);
  return mode;
}
static void end_tiles(unsigned mode) { _tile_release(); _mm_setcsr(mode); }
OUTLINE void pair_steps(int parts, int pair, const char *x, long next, const char *panel,
                        long steps, const char *last, float *c, long ldc) {
  __asm__ volatile("" ::: "memory");
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (long i = 0; i < steps; i++, panel += 64 * NC) {
    if (i == steps - 1 && last) panel = last;
    _tile_stream_loadd(4, panel, 4 * NC);  // so that x stays in the first-level cache
    _tile_stream_loadd(5, panel + 64, 4 * NC);
    for (int part = 0; part < parts; part++, x += A_TILE) {
      _tile_loadd(6, x, 64);
      _tile_dpbf16ps(0, 6, 4); _tile_dpbf16ps(1, 6, 5);
      if (!pair) continue;
      _tile_loadd(7, x + next, 64);
      _tile_dpbf16ps(2, 7, 4); _tile_dpbf16ps(3, 7, 5);
    }
  }
  _tile_stored(0, c, 4 * ldc); _tile_stored(1, c + 16, 4 * ldc);
  if (!pair) return;
  _tile_stored(2, c + 16 * ldc, 4 * ldc); _tile_stored(3, c + 16 * ldc + 16, 4 * ldc);
}
// c[16][64] = as many steps of 16 rows of x times those of 64 columns, bf16 or integers
#define WIDE_STEPS(dot) for (long i = 0; i < steps; i++, panel += 4096, x += A_TILE) { \
  if (i == steps - 1 && last) panel = last; \
  _tile_loadd(6, x, 64); \
  _tile_loadd(4, panel, 256); dot(0, 6, 4); _tile_loadd(5, panel + 64, 256); dot(1, 6, 5); \
  _tile_loadd(7, panel + 128, 256); dot(2, 6, 7); _tile_loadd(4, panel + 192, 256); dot(3, 6, 4); \
}
OUTLINE void wide_steps(int type, const char *x, const char *panel, long steps, const char *last,
                        float *c) {
  __asm__ volatile("" ::: "memory");
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  if (type == INT8) WIDE_STEPS(_tile_dpbssd)
  else WIDE_STEPS(_tile_dpbf16ps)
  _tile_stored(0, c, 256); _tile_stored(1, c + 16, 256);
  _tile_stored(2, c + 32, 256); _tile_stored(3, c + 48, 256);
}
// For attention. `rows`: two times 16 rows of the cache, `apart` bytes apart. They are the left
// factor, c[2][16][16] = each times y, or the right one, c[steps][16][16] = the tile at x times
// the first 16 plus the tile at x + next times the others, for 64 bytes of each row at a step.
INLINE void left_rows(const char *rows[2], const long apart[2], const char *y, long steps,
                      float *c) {
  _tile_zero(0); _tile_zero(1);
  for (long i = 0; i < steps; i++) {
    _tile_loadd(5, y + A_TILE * i, 64);
    _tile_loadd(4, rows[0] + 64 * i, apart[0]); _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(7, rows[1] + 64 * i, apart[1]); _tile_dpbf16ps(1, 7, 5);
  }
  _tile_stored(0, c, 64); _tile_stored(1, c + 256, 64);
}
INLINE void right_rows(const char *rows[2], const long apart[2], const char *x, long next,
                       long steps, float *c) {
  for (long i = 0; i < steps; i++) {
    _tile_zero(2);
    _tile_loadd(6, x, 64);
    _tile_loadd(4, rows[0] + 64 * i, apart[0]); _tile_dpbf16ps(2, 6, 4);
    _tile_loadd(6, x + next, 64);
    _tile_loadd(7, rows[1] + 64 * i, apart[1]); _tile_dpbf16ps(2, 6, 7);
    _tile_stored(2, c + 256 * i, 64);
  }
}
#else
enum { tiles = 0 };
static unsigned begin_tiles(long rows, int cache) { return 0; }
static void end_tiles(unsigned mode) {}
INLINE void pair_steps(int parts, int pair, const char *x, long next, const char *panel,
                       long steps, const char *last, float *c, long ldc) {}
INLINE void wide_steps(int type, const char *x, const char *panel, long steps, const char *last,
                       float *c) {}
INLINE void left_rows(const char *rows[2], const long apart[2], const char *y, long steps,
                      float *c) {}
INLINE void right_rows(const char *rows[2], const long apart[2], const char *x, long next,
                       long steps, float *c) {}
#endif
// Where byte `at` of row m goes, when all tiles of a row have `width` bytes of it.
INLINE char *in_tiles(char *x, long width, int parts, long m, long at) {
  return x + m / 16 * 16 * width + at / 64 * parts * A_TILE + m % 16 * 64 + at % 64;
}
INLINE long steps_of(int type, long K) { return type == INT8 ? (K + 63) / 64 : (K + 31) / 32; }
// Row m of x into tiles. In two parts its numbers are high + low, two bf16 numbers each.
INLINE void row_to_tiles(int parts, const char *x, long K, char *tiles, long width, long m) {
  for (long k = 0; k < K; k += 32) {
    char *to = in_tiles(tiles, width, parts, m, 2 * k);
    if (parts == 1) { *(u32s *)to = words(x + 2 * k, 2 * (K - k)); continue; }
    for (long i = k; i < k + 32; i += 16, to += 32) {
      f32s v = i < K ? get(FP32, x, i, K) : splat(0);
      store16(BF16, to, v);
      store16(BF16, to + A_TILE, v - load16(BF16, to));
    }
  }
}
// ---- linear layers ----------------------------------------------------------------------------
// out[T][N] = x[T][K] @ w^T + bias, w in bf16. An fp32 x is split into two bf16 numbers, x = high +
// low, and multiplied twice: 16 bits of x count, and at few rows, where reading w takes the time,
// it costs nothing. Threads share the panels. Rows go in blocks of 192: a block of x stays in the
// second-level cache while the panels pass by.
// `gated`: w has two halves of N rows, and out = silu(x @ first^T) * (x @ second^T). The products
// of a prompt would be more to write, and to read again, than all that is read here.
typedef struct {
  const char *x, *w, *bias; char *out; long T, N, K, ldx, ldo, bf_out, gated;
  long steps, width; char *in, *last; float *sums[2];  // rows in tiles, last step, two results
} Dense;
INLINE long panels_of(long N) { return (N + NC - 1) / NC; }
INLINE const char *panel_at(const Dense *a, long p, int second) {
  return a->w + (p + second * panels_of(a->N)) * a->K * NC * 2;
}
// The end of every linear layer: 16 columns of a row, and if it is gated those of the second half.
INLINE void put_columns(int bf, int bf_out, int gated, f32s v, f32s second, const char *bias,
                        char *out, long column, long N) {
  if (bias) v += get(bf, bias, column, N);
  if (gated && bias) second += get(bf, bias, N + column, 2 * N);
  if (gated) v = silu16(v) * second;
  put(bf_out, out, column, N, v);
}
// One row of a panel's columns, 32 sums, and those of the second half.
INLINE void linear_row(int bf, const Dense *a, const f32s *c, const f32s *second, long m, long p) {
  char *out = a->out + m * a->ldo * size_of(a->bf_out);
  for (int j = 0; j < 2 && p * NC + 16 * j < a->N; j++)
    put_columns(bf, a->bf_out, a->gated, c[j], a->gated ? second[j] : c[j], a->bias, out,
                p * NC + 16 * j, a->N);
}
INLINE void linear_rows(int R, int bf, const Dense *a, const char *low, long m, long p) {
  f32n c[2][ROWS][PARTS], d[ROWS][PARTS];
  for (int half = 0; half <= a->gated; half++) {
    tile(1, R, panel_at(a, p, half), a->x + m * a->ldx * 2, a->ldx, a->K, c[half]);
    if (!bf) tile(1, R, panel_at(a, p, half), low + m * a->ldx * 2, a->ldx, a->K, d);
    for (int r = 0; !bf && r < R; r++) for (int j = 0; j < PARTS; j++) c[half][r][j] += d[r][j];
  }
  for (int r = 0; r < R; r++) linear_row(bf, a, (f32s *)c[0][r], (f32s *)c[1][r], m + r, p);
}
INLINE long linear_shared(int bf, long T, long K) { return bf || tiles ? 0 : T * K * 4; }
// The same with tiles. Every thread copies the rows that it multiplies for itself: to share a copy
// they would wait for one another, and fetch it from the other's cache. So few rows, a decode step,
// are copied by all, who share the panels; of many rows each thread has its own. Then half a MB of
// panels passes by at a time, which stays in the second-level cache for all rows of the block.
// A last step of less than 32 k is copied and padded.
INLINE void dense_rows(int bf, const Dense *a, long m0, long m1, long p0, long p1) {
  long rest = a->K % 32 * NC * 2, row = p1 - p0, half_sums = PAIR_ROWS * NC;
  long count = (m1 - m0 + PAIR_ROWS - 1) / PAIR_ROWS * row;
  for (long b = 0; b <= count; b++) {
    for (int half = 0; half <= a->gated && b < count; half++) {
      long m = m0 + b / row * PAIR_ROWS, p = p0 + b % row;
      const char *panel = panel_at(a, p, half);
      if (rest) memcpy(a->last, panel + (a->steps - 1) * 64 * NC, rest);
      pair_steps(2 - bf, m1 - m > 16, a->in + (m - m0) * a->width, 16 * a->width, panel, a->steps,
                 rest ? a->last : 0, a->sums[b % 2] + half * half_sums, NC);
    }
    if (b == 0) continue;
    // The block before is written out while the tiles are busy.
    long m = m0 + (b - 1) / row * PAIR_ROWS, p = p0 + (b - 1) % row;
    const float *c = a->sums[(b - 1) % 2];
    for (long r = m; r < least(m1, m + PAIR_ROWS); r++, c += NC)
      linear_row(bf, a, (const f32s *)c, (const f32s *)(c + half_sums), r, p);
  }
}
// Are there so many rows that every thread gets some to itself? And how many a block has, if it may
// have up to `limit` and each thread is to have as many blocks.
INLINE int many_rows(long T) { return T > 128 * omp_get_num_threads(); }
INLINE long block_rows(long T, long limit, long unit) {
  long blocks = round_up((T + limit - 1) / limit, many_rows(T) ? omp_get_num_threads() : 1);
  return round_up((T + blocks - 1) / blocks, unit);
}
INLINE void linear_tiles(int bf, Team *t, Dense *a) {
  long threads = omp_get_num_threads(), panels = panels_of(a->N), own_rows = many_rows(a->T);
  long rows = block_rows(a->T, 256, PAIR_ROWS), blocks = (a->T + rows - 1) / rows;
  long step = own_rows ? panels : 1 + panels / (8 * threads);
  step = most(1, least(step, (1 << 19) / (a->K * NC * 2 * (1 + a->gated))));
  long groups = (panels + step - 1) / step, each = own_rows ? groups : 1, held = -1;
  a->steps = steps_of(BF16, a->K);
  a->width = a->steps * 64 * (2 - bf);
  a->last = room(&own, 64 * NC + 4 * PAIR_ROWS * NC * 4 + rows * a->width);
  a->sums[0] = (float *)(a->last + 64 * NC);
  a->sums[1] = a->sums[0] + 2 * PAIR_ROWS * NC;
  a->in = (char *)(a->sums[1] + 2 * PAIR_ROWS * NC);
  unsigned mode = begin_tiles(a->T, 0);
  memset(a->last, 0, 64 * NC);
  for (long i; (i = next(t) * each) < blocks * groups;) {
    long m0 = i / groups * rows, m1 = least(a->T, m0 + rows);
    for (long m = m0; m < m1 && held != m0; m++)
      row_to_tiles(2 - bf, a->x + m * a->ldx * size_of(bf), a->K, a->in, a->width, m - m0);
    held = m0;
    for (long g = i % groups; g < i % groups + each; g++)
      dense_rows(bf, a, m0, m1, g * step, least(panels, (g + 1) * step));
  }
  end_tiles(mode);
}
INLINE void linear(int bf, Team *t, Dense *a) {
  if (tiles) { linear_tiles(bf, t, a); return; }
  long panels = panels_of(a->N), step = 1 + panels / (8 * omp_get_num_threads());
  long groups = (panels + step - 1) / step, blocks = (a->T + 191) / 192;
  char *low = (char *)t->shared + a->T * a->K * 2;
  if (!bf) {
    char *high = (char *)t->shared;
    for (long m; (m = next(t)) < a->T;) for (long i = 0; i < a->K; i += 16) {
      f32s v = get(0, a->x + m * a->ldx * 4, i, a->K);
      put(1, high + m * a->K * 2, i, a->K, v);
      put(1, low + m * a->K * 2, i, a->K, v - get(1, high + m * a->K * 2, i, a->K));
    }
    barrier(t);
    a->x = high; a->ldx = a->K;
  }
  for (long i; (i = next(t)) < groups * blocks;) {
    long p0 = i % groups * step, m0 = i / groups * 192, m1 = least(a->T, m0 + 192);
    for (long p = p0; p < least(panels, p0 + step); p++) for (long m = m0; m < m1; m += ROWS)
      WITH_R(m1 - m, linear_rows, bf, a, low, m, p)
  }
}
// ---- linear layers with narrow weights ----------------------------------------------------------
// w[n][k] = code[n][k] * scale[n][k / group] + min[n][k / group], so over one group of columns
//     sum x w = scale * (sum x code) + min * (sum x)
// The inner loop multiplies codes, which fp32 and bf16 hold exactly; scale and min are applied to
// its fp32 sum. A panel is 64 columns here: one row alone needs that many independent sums to keep
// the multipliers busy. A word holds 8 codes of 4 bits or 4 codes of 8 bits of one column, in two's
// complement: [K/8 or K/4][64 columns] words. Even k lie in the lower half of a word, odd k in the
// upper one, because that is where the two numbers of a bf16 word will go:
//     4 bits   k = 7 5 3 1 | 6 4 2 0         8 bits   k = 3 1 | 2 0
// One row of x: a word is widened in a register and used there. More rows: half a panel is widened
// into the first-level cache, a unit of up to 128 k at a time, as a panel of `tile`.
enum { W4, W8, WF8, W8A8 };  // forms of a weight; W8A8: of 8 bits, and x is rounded to int8 as well
typedef struct {
  const char *x, *codes, *scales, *mins, *bias; const int64_t *inputs; char *out;
  long T, N, K, ldx, ldo, bf_out, group, bf_scales, gated;
  long KP, unit, units, width, step;  // K rounded up to 8; bytes of a ready row, of a unit in tiles
} Narrow;
INLINE long bits_of(int form) { return form == W4 ? 4 : 8; }
INLINE f32n number(int form, u32n w, int place) {  // the code at this place of every word
#ifdef __AVX512F__  // a shift, and a look-up in a table of 16
  const __m512 table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  if (form == W4) return (f32n)_mm512_permutexvar_ps((__m512i)(w >> 4 * place), table);
#endif
  int bits = bits_of(form);
  i32n top = (i32n)(w << (32 - bits * (place + 1)));
  if (form != WF8) return __builtin_convertvector(top >> (32 - bits), f32n);
  // e4m3: sign, 4 bits of exponent, 3 of fraction. They move to their places in an fp32, whose
  // exponent is 120 larger for the same number; the copies of the sign are masked out.
  return (f32n)((top >> 4) & (int)0x87f00000) * 0x1p120f;
}
INLINE u32n unpack(int form, int type, u32n w, int i) {  // word i of `tile` from a word of codes
  int half = 16 / bits_of(form);
  if (type == FP32) return (u32n)number(form, w, i / 2 + i % 2 * half);
  if (type == INT8 && BYTES == 4) return w ^ 0x80808080u;  // code + 128: dpbusd wants it unsigned
  if (type == INT8) {
    typedef int16_t i16n __attribute__((vector_size(4 * LANES), may_alias));
    return (u32n)((i16n)(w << (8 - 8 * i)) >> 8);
  }
#ifdef __AVX512BF16__  // both halves in one look-up; it takes 5 bits, so the table is there twice
  const u32n table = {0x3f800000, 0x40404000, 0x40a04080, 0x40e040c0, 0xc0e0c100, 0xc0a0c0c0,
                      0xc040c080, 0xbf80c000, 0x3f800000, 0x40404000, 0x40a04080, 0x40e040c0,
                      0xc0e0c100, 0xc0a0c0c0, 0xc040c080, 0xbf80c000};
  if (form == W4) return (u32n)_mm512_permutexvar_epi16((__m512i)(w >> 4 * i), (__m512i)table);
#endif
  return ((u32n)number(form, w, i) >> 16) | (u32n)number(form, w, i + half);
}
// One row times a unit of a whole panel, four registers of sums at a time: each waits four cycles
// for its last addition. Every sum runs in the order of `tile`. The codes 2 KB ahead are asked for:
// unpacking leaves the processor no room to look that far by itself (int8: 8.9 -> 13 GB/s).
INLINE void tile_codes(int form, int type, const char *codes, const char *x, long n, f32n *c) {
  long per = 32 / bits_of(form), words = per / in_word(type);
  for (int j0 = 0; j0 < 2 * PARTS; j0 += 4) {
    f32n a[4] = {};
    const char *w = codes + j0 * sizeof(u32n), *x_k = x;
    for (long k = 0; k < n; k += per, w += 256, x_k += 4 * words) {
      if (!j0) for (int b = 0; b < 256; b += 64) __builtin_prefetch(w + 2048 + b);
      for (int i = 0; i < words; i++) for (int j = 0; j < 4; j++)
        a[j] = multiply_add(type, a[j], unpack(form, type, ((const u32n *)w)[j], i), x_k + 4 * i);
    }
    for (int j = 0; j < 4; j++) c[j0 + j] = a[j];
  }
}
// The first `columns` of 64 as a panel. If that is all of them, codes are asked for in advance.
INLINE void unpack_unit(int form, int type, int columns, const char *codes, long n, char *panel) {
  long per = 32 / bits_of(form);
  for (long k = 0; k < n; k += per, codes += 256) {
    for (int b = 0; columns == 64 && b < 256; b += 64) __builtin_prefetch(codes + 8192 + b);
    for (int i = 0; i < per / in_word(type); i++)
      for (int j = 0; j < columns / LANES; j++, panel += sizeof(u32n))
        *(u32n *)panel = unpack(form, type, ((const u32n *)codes)[j], i);
  }
}
// Scales and minima of 32 columns at a place of their tables, in fp32; then, for a row,
// sums += scale * c + min * sum_x, where c and sum_x are of one unit.
typedef struct { f32n scales[PARTS], mins[PARTS]; } Factors;
INLINE f32n factor(int bf, const char *table, long at) {
  if (!table) return (f32n){};
  if (!bf) return *(const f32n *)(table + at * 4);
  typedef uint16_t u16n __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  return (f32n)(__builtin_convertvector(*(const u16n *)(table + at * 2), u32n) << 16);
}
INLINE Factors factors(const Narrow *a, long at) {
  Factors f;
  for (int j = 0; j < PARTS; j++) {
    f.scales[j] = factor(a->bf_scales, a->scales, at + j * LANES);
    f.mins[j] = factor(a->bf_scales, a->mins, at + j * LANES);
  }
  return f;
}
INLINE void scale_unit(int type, const Factors *f, const f32n *c, float sum_x, f32n *sums) {
  for (int j = 0; j < PARTS; j++) {
    f32n v = type == INT8 ? __builtin_convertvector((i32n)c[j], f32n) : c[j];
    if (type == INT8 && BYTES == 4 && !tiles) v -= 128 * sum_x;
    sums[j] = sums[j] + f->mins[j] * sum_x + f->scales[j] * v;
  }
}
INLINE void unit_rows(int R, int type, const Narrow *a, const Factors *f, const char *panel,
                      const char *x, long n, const float *sums_x, float *sums) {
  f32n c[ROWS][PARTS];
  tile(type, R, panel, x, a->KP, n, c);
  for (int r = 0; r < R; r++)
    scale_unit(type, f, c[r], sums_x[r * a->units], (f32n *)(sums + r * 64));
}
static __attribute__((noinline)) void all_rows(int type, const Narrow *a, const Factors *f,
    const char *panel, const char *x, long M, long n, const float *sums_x, float *sums) {
#define PASS(type) for (long m = 0; m < M; m += ROWS) WITH_R(M - m, unit_rows, type, a, f, panel, \
    x + m * a->KP * 4 / in_word(type), n, sums_x + m * a->units, sums + m * 64)
  if (type == FP32) PASS(FP32) else if (type == BF16) PASS(BF16) else PASS(INT8)
}
INLINE integers to_integers(f32s v) {  // in the order of the codes
  i32s q = __builtin_convertvector(v, i32s);
#ifdef __AVX512VNNI__  // two instructions; of the lines below gcc 12 makes sixty
  const __m128i order = {0x0705060403010200, 0x0f0d0e0c0b090a08};
  return (integers)_mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)q), order);
#else
  if (BYTES == 4) q = PICK(q, q, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  return __builtin_convertvector(q, integers);
#endif
}
// The same with tiles: a few rows; and a row of x into tiles, each unit padded to whole steps.
OUTLINE void scale_rows(int type, const Factors *f, const float *c, long rows, const float *sums_x,
                        long units, float *sums) {
  Factors low = f[0], high = f[1];  // in registers: nothing that is written below can be they
  for (long r = 0; r < rows; r++, sums_x += units, c += 64, sums += 64) {
    scale_unit(type, &low, (f32n *)c, *sums_x, (f32n *)sums);
    scale_unit(type, &high, (f32n *)(c + NC), *sums_x, (f32n *)(sums + NC));
  }
}
INLINE void units_into_tiles(int type, const Narrow *a, const float *line, char *x, long m) {
  for (long u = 0; u < a->units; u++) {
    long k = u * a->unit, end = least(a->KP, k + a->unit), z = type == INT8 ? 1 : 2;
    long at = u * steps_of(type, a->unit) * 64, stop = at + steps_of(type, end - k) * 64;
    for (; at < stop; at += 16 * z, k += 16) {
      f32s v = k < end ? get(FP32, (const char *)line, k, end) : splat(0);
      char *to = in_tiles(x, a->width, 1, m, at);
      if (type == BF16) store16(BF16, to, v);
      else { integers q = to_integers(v); memcpy(to, &q, 16); }
    }
  }
}
// A row of x as the loops want it: in the order of the columns, padded with zeros, for W8A8 as
// integers (the largest becomes 127, halves go to even); and the sum of each unit. Returns the
// scale of the row, NaN if x holds one.
static float ready_row(int bf, int type, int tiled, const Narrow *a, const char *x, float *line,
                       char *to, float *sums_x) {
  f32s top = {};
  for (long k = 0; k < a->KP; k += 16) *(f32s *)(line + k) = get(bf, x, k, a->K);
  for (long k = 0; a->inputs && k < a->K; k++) {
    const char *from = x + a->inputs[k] * size_of(bf);
    line[k] = *(float *)&(word){bf ? *(const uint16_t *)from << 16 : *(const word *)from};
  }
  for (long k = 0; k < a->KP; k += 16) {
    f32s v = *(f32s *)(line + k);
    top = larger(where(v < 0, -v, v), top);
  }
  float scale = type == INT8 ? fmaxf(lanes_max(top) / 127, 1e-12f) : 1, total = 0;
  for (long k = 0; k < a->KP; k += 16, to += 64 / in_word(type)) {
    f32s v = *(f32s *)(line + k);
    if (type == INT8) *(f32s *)(line + k) = v = (v / scale + 12582912.f) - 12582912.f;
    if (tiled) continue;
    integers narrowed = to_integers(v);
    if (type == INT8) memcpy(to, &narrowed, least(16, a->KP - k) * 4 / BYTES);
    else put(type, to, 0, a->KP - k, v);
  }
  for (long u = 0; u < a->units; u++) {
    f32s sum = {};
    long end = least(a->KP, (u + 1) * a->unit);
    for (long k = u * a->unit; k < end; k += 16) sum += get(0, (char *)line, k, end);
    total += sums_x[u] = lanes_sum(sum);
  }
  return scale + 0 * total;
}
// The panel at `column` times M rows of x, unit by unit: sums[M][64].
INLINE void panel_rows(int form, int type, const Narrow *a, long column, const char *x, long M,
                       const float *sums_x, char *space, float *sums) {
  long groups = (a->K + a->group - 1) / a->group;
  memset(sums, 0, M * 64 * 4);
  for (long u = 0, k = 0; u < a->units; u++, k += a->unit) {
    long n = least(a->unit, a->KP - k);
    const char *codes = a->codes + (column * a->KP + k * 64) * bits_of(form) / 8;
    const char *at = x + k * 4 / in_word(type);
    f32n c[2][PARTS];
    if (M == 1) tile_codes(form, type, codes, at, n, c[0]);
    for (int h = 0; h < 2; h++) {
      Factors f = factors(a, column * groups + k / a->group * 64 + h * NC);
      if (M == 1) { scale_unit(type, &f, c[h], sums_x[u], (f32n *)(sums + h * NC)); continue; }
      unpack_unit(form, type, NC, codes + h * 128, n, space);
      all_rows(type, a, &f, space, at, M, n, sums_x + u, sums + h * NC);
    }
  }
}
// One row is read faster without tiles, from a register as in tile_codes; x in fp32. The sums run
// in the order of the tiles: even and odd k of each 32 apart, then their sum is added.
INLINE void codes_as_tiles(int form, const char *codes, const float *x, long n, f32n *c) {
  long per = 32 / bits_of(form);
  for (int j = 0; j < 2 * PARTS; j++) c[j] = (f32n){};
  for (long k = 0; k < n;) {
    f32n a[2][2 * PARTS] = {};
    for (long end = least(n, k + 32); k < end; k += per, codes += 256) {
      for (int b = 0; b < 256; b += 64) __builtin_prefetch(codes + 2048 + b);
      for (int i = 0; i < per; i++) for (int j = 0; j < 2 * PARTS; j++)
        a[i % 2][j] += number(form, ((const u32n *)codes)[j], i / 2 + i % 2 * per / 2) * x[k + i];
    }
    for (int j = 0; j < 2 * PARTS; j++) c[j] += a[0][j] + a[1][j];
  }
}
// More rows with tiles. A widened unit is padded to whole steps; 8-bit codes for integers are tiles
// as they lie.
INLINE void panel_tiles(int form, const Narrow *a, long column, const char *x, const float *line,
                        long M, const float *sums_x, char *space, float *c, float *sums) {
  int type = form == W8A8 ? INT8 : BF16;
  long groups = (a->K + a->group - 1) / a->group;
  memset(sums, 0, M * 64 * 4);
  for (long u = 0, k = 0; u < a->units; u++, k += a->unit) {
    long n = least(a->unit, a->KP - k), steps = steps_of(type, n);
    long place = column * groups + k / a->group * 64;
    const char *panel = a->codes + (column * a->KP + k * 64) * bits_of(form) / 8, *last = 0;
    Factors f[2] = {factors(a, place), factors(a, place + NC)};
    if (type == BF16 && a->T == 1) {
      codes_as_tiles(form, panel, line + k, n, (f32n *)c);
      scale_rows(type, f, c, 1, sums_x + u, a->units, sums);
      continue;
    }
    if (type == BF16) {
      unpack_unit(form, BF16, 64, panel, n, space);
      panel = space;
      memset(space + n * 128, 0, steps * 4096 - n * 128);
    } else if (n % 64) {
      last = memset(space, 0, 4096);
      memcpy(space, panel + n / 64 * 4096, n % 64 * 64);
    }
    for (long m = 0; m < M; m += 16) {
      wide_steps(type, x + m * a->width + u * a->step, panel, steps, last, c);
      scale_rows(type, f, c, least(M - m, 16), sums_x + m * a->units + u, a->units, sums + m * 64);
    }
  }
}
INLINE int narrow_type(int bf, int form) {  // what `tile` multiplies
#ifdef __AVX512BF16__
  return form == W8A8 ? INT8 : bf ? BF16 : FP32;
#else
  return form == W8A8 ? INT8 : FP32;
#endif
}
// An fp32 x counts in full here, which would take three parts: no tiles.
INLINE int tiled(int bf, int form) { return tiles && narrow_type(bf, form) != FP32; }
// The rest of a Narrow. A unit lies within a group. It has up to 128 k, because it is widened into
// the first-level cache, or up to 16384 of integers, which need not be.
static void size_up(int bf, int form, Narrow *a) {
  int whole = tiled(bf, form) && form == W8A8 && (a->group >= a->K || a->group <= 16384);
  a->KP = round_up(a->K, 8);
  a->unit = least(least(round_up(a->group, 8), whole ? 16384 : 128), a->KP);
  a->units = (a->KP + a->unit - 1) / a->unit;
  a->width = a->KP * 4 / in_word(narrow_type(bf, form));
  a->step = steps_of(narrow_type(bf, form), a->unit) * A_TILE;
  if (tiled(bf, form)) a->width = a->units * a->step / 16;
}
INLINE long ready_size(const Narrow *a, long rows) {  // with the sums of the units and the scales
  return round_up(round_up(rows, 16) * a->width + rows * (a->units + 1) * 4, 64);
}
// Rows of a block, ready to be multiplied: in tiles or one after the other, then the rest of them.
typedef struct { char *x; float *sums, *scales; } Ready;
INLINE Ready ready_at(const Narrow *a, char *x, long rows) {
  float *sums = (float *)(x + round_up(rows, 16) * a->width);
  return (Ready){x, sums, sums + rows * a->units};
}
OUTLINE void get_ready(int bf, int form, const Narrow *a, long row, Ready to, long m, float *line) {
  int type = narrow_type(bf, form), use_tiles = tiled(bf, form);
  to.scales[m] = ready_row(bf, type, use_tiles, a, a->x + row * a->ldx * size_of(bf), line,
                           to.x + m * a->width, to.sums + m * a->units);
  if (use_tiles) units_into_tiles(type, a, line, to.x, m);
}
// As in linear_tiles, each of many rows is made ready by the thread that multiplies it, and so are
// up to 4, by every thread: that is faster than to wait for one another. The others are shared.
INLINE void narrow(int bf, Team *t, int form, const Narrow *a) {
  int type = narrow_type(bf, form), use_tiles = tiled(bf, form);
  long panels = (a->N + 63) / 64, threads = omp_get_num_threads();
  long many = many_rows(a->T), alone = many || a->T <= 4, held = -1;
  long block = block_rows(a->T, 128, 16), blocks = (a->T + block - 1) / block;
  long step = many ? panels : 1 + panels / (8 * threads), shares = (panels + step - 1) / step;
  // Of this thread: a widened unit, sums of a block and of the second half, a row in fp32; rows.
  long fixed = round_up((NC * 128 + 384 * 64 + a->KP + 16) * 4, 64);
  char *space = room(&own, fixed + ready_size(a, alone ? block : 0));
  float *sums = (float *)(space + NC * 128 * 4), *c = sums + 256 * 64, *line = c + 32 * NC;
  Ready all = alone ? ready_at(a, space + fixed, block) : ready_at(a, (char *)t->shared, a->T);
  unsigned mode = use_tiles ? begin_tiles(a->T, 0) : 0;
  for (long m; !alone && (m = next(t)) < a->T;) get_ready(bf, form, a, m, all, m, line);
  if (!alone) barrier(t);
  for (long i; (i = next(t)) < shares * blocks;) {
    long m0 = i / shares * block, m1 = least(a->T, m0 + block), p0 = i % shares * step;
    for (long m = m0; alone && held != m0 && m < m1; m++)
      get_ready(bf, form, a, m, all, m - m0, line);
    held = m0;
    long first = alone ? 0 : m0;
    const char *x = all.x + first * a->width;
    const float *sums_x = all.sums + first * a->units, *scales = all.scales + first;
    for (long p = p0; p < least(panels, p0 + step); p++) {
      for (int half = 0; half <= a->gated; half++) {
        long column = (p + half * panels) * 64;
        float *to = sums + half * 128 * 64;
        if (use_tiles) panel_tiles(form, a, column, x, line, m1 - m0, sums_x, space, c, to);
        else panel_rows(form, type, a, column, x, m1 - m0, sums_x, space, to);
      }
      for (long m = 0; m < m1 - m0; m++) for (long j = 0; j < 64 && p * 64 + j < a->N; j += 16) {
        f32s v = *(f32s *)(sums + m * 64 + j) * scales[m], w = v;
        if (a->gated) w = *(f32s *)(sums + (128 + m) * 64 + j) * scales[m];
        put_columns(bf, a->bf_out, a->gated, v, w, a->bias,
                    a->out + (m0 + m) * a->ldo * size_of(a->bf_out), p * 64 + j, a->N);
      }
    }
  }
  if (use_tiles) end_tiles(mode);
}
// Rows ids[T] of a table (N, K) in any of these forms: the first contribution to the residual
// stream, which is set to 0 here.
enum { TABLE32 = -3, TABLE16, PANELS };  // rows of fp32, rows of bf16, panels of `linear`
INLINE void embed(int bf, Team *t, int form, const Narrow *a, const int64_t *ids, float *residual) {
  long z = size_of(bf), K = a->K, per = form < 0 ? 2 : 32 / bits_of(form);
  long bf_table = form != TABLE32, panel_groups = (K + a->group - 1) / a->group;
  EACH_ROW(m, a->T, K) {
    long row = ids[m];
    char *out = a->out + m * K * z;
    memset(residual + m * K, 0, K * 4);
    if (row < 0 || row >= a->N) {  // no such row: the engine takes what is not finite for an error
      for (long k = 0; k < K; k += 16) put(bf, out, k, K, splat(NAN));
      continue;
    }
    if (form == TABLE32 || form == TABLE16) {
      const char *from = a->codes + row * K * size_of(bf_table);
      for (long k = 0; k < K; k += 16) put(bf, out, k, K, get(bf_table, from, k, K));
    }
    if (form == PANELS) {
      const word *from = (const word *)a->codes + row / NC * NC * K / 2 + row % NC;
      for (long k = 0; k < K; k++) {
        word w = from[k / 2 * NC] << (k % 2 ? 0 : 16) & 0xffff0000u;
        put(bf, out, k, k + 1, splat(*(float *)&w));
      }
    }
    const word *codes = (const word *)a->codes + row / 64 * 64 * a->KP / per + row % 64;
    for (long k = 0; form >= 0 && k < K; k++) {
      long at = (row / 64 * panel_groups + k / a->group) * 64 + row % 64 / LANES * LANES;
      long lane = row % LANES, place = k % per / 2 + k % 2 * per / 2;
      float v = number(form, codes[k / per * 64] - (u32n){}, place)[0];
      v = v * factor(a->bf_scales, a->scales, at)[lane] + factor(a->bf_scales, a->mins, at)[lane];
      put(bf, out, k, k + 1, splat(v));
    }
  }
}
// ---- attention over the paged cache: one chunk --------------------------------------------------
// Positions are taken in chunks of 128. Each chunk is a complete small attention: the largest score
// m, the sum l of e^(s-m), and o, the sum of e^(s-m) v. Two such results merge into one:
//     m = max(m1, m2)    l = l1 e^(m1-m) + l2 e^(m2-m)    o = o1 e^(m1-m) + o2 e^(m2-m)
// and the answer is o / l: the *online softmax* (Milakov and Gimelshein 2018). Merging as one goes
// is FlashAttention; chunks computed by other threads and merged at the end are flash-decoding.
// Here both do the same operations in the same order, hence the same bits.
static const float NEVER = -1e30f;  // a score that is not seen; finite: NEVER - NEVER is not NaN
// Where the rows of a chunk lie. While one chunk is computed the next is asked for, a few rows at a
// time: memory answers after hundreds of cycles, and blocks lie anywhere. All heads of a position
// are asked for at once: they lie side by side, and the processor looks ahead by itself. (Heads are
// computed one by one, so a chunk is read again and again; attend_few reads it once, and asks for
// the rows that come next.)
// `at` leads from the first of these heads, where k and v point, to the one that is computed.
typedef struct {
  const char *k[CHUNK], *v[CHUNK]; const float *scale[CHUNK]; float k_scale[CHUNK], v_scale[CHUNK];
  long n, fetched, bytes, heads, at;
} Rows;
INLINE void fetch(Rows *r) {  // called n / 8 times or more for each head of the chunk at work
  long end = least(r->n, r->fetched + (8 + r->heads - 1) / r->heads);
  for (; r->fetched < end; r->fetched++)
    for (long b = 0; b < r->bytes; b += 64) {
      __builtin_prefetch(r->k[r->fetched] + b);
      __builtin_prefetch(r->v[r->fetched] + b);
    }
}
// Keys: 16 words of 16 positions, turned so that a vector holds one word of every position. Each
// round of SWAP mixes the rows that are n apart; the first two leave words 4i+1 and 4i+2 exchanged.
#define SWAP(n, LOW, HIGH) for (int i = 0; i < 16; i++) if (!(i & n)) { \
  u32s x = a[i], y = a[i + n]; a[i] = PICK(x, y, LOW); a[i + n] = PICK(x, y, HIGH); }
#define LOW32 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH32 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW64 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH64 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define EVEN128 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD128 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
INLINE void transpose16(u32s *a) {
#ifdef __AVX512F__  // gcc 12 makes 256 scalar moves of the loops below
  SWAP(1, LOW32, HIGH32) SWAP(2, LOW64, HIGH64) SWAP(4, EVEN128, ODD128) SWAP(8, EVEN128, ODD128)
  for (int i = 1; i < 16; i += 4) { u32s x = a[i]; a[i] = a[i + 1]; a[i + 1] = x; }
#else
  u32s b[16];
  memcpy(b, a, sizeof b);
  for (int i = 0; i < 16; i++) for (int j = 0; j < 16; j++)
    ((word *)a)[i * 16 + j] = ((word *)b)[j * 16 + i];
#endif
}
INLINE void key_words(int kv, const Rows *now, long t, long d, long D, u32s *w) {
  long z = size_of(kv), bytes = (D - d) * z, at = now->at + d * z;
  if (bytes >= 64) for (int i = 0; i < 16; i++) w[i] = *(const u32s *)(now->k[t + i] + at);
  else for (int i = 0; i < 16; i++) w[i] = last_words(now->k[t + i] + at, bytes);
  transpose16(w);
}
// Part j of what words of the cache hold, as fp32, or as words of a panel: an fp32 or two bf16.
INLINE u32s widen32(int kv, u32s w, int j) {
  if (kv == BF16) return w << (j ? 0 : 16) & 0xffff0000u;
  return (u32s)from_byte(kv, w >> 8 * j);
}
INLINE u32s pairs(u32s x, u32s y) { return (x >> 16) | (y & 0xffff0000u); }
INLINE u32s widen(int kv, int bf, u32s w, int j) {
  if (kv == bf) return w;
  return bf ? pairs(widen32(kv, w, 2 * j), widen32(kv, w, 2 * j + 1)) : widen32(kv, w, j);
}
// Values: 32 coordinates of one position, or in bf16 of two that are 16 apart: the even ones, then
// the odd ones, which needs no shuffle. `finish` puts them back in order. Only fp32 lies in order.
INLINE u32s value_row(int kv, const char *row, long d, long D) {  // 16 words that widen32 takes
  long bytes = (D - d) * size_of(kv);
  row += d * size_of(kv);
  if (kv <= BF16) return words(row, bytes);
  u32s part;
  if (bytes < 32) { part = last_words(row, bytes); row = (const char *)&part; }
  return load_halves(row);
}
INLINE void value_words(int kv, int bf, const Rows *now, long i, long d, long D, u32s w[2]) {
  long t = bf ? i / 16 * 32 + i % 16 : i;
  const char *row = now->v[t] + now->at, *next = now->v[t + 16 * bf] + now->at;
  u32s x = value_row(kv, row, d, D), y = bf ? value_row(kv, next, d, D) : x;
  for (int j = 0; j < 2; j++) {
    if (kv == FP32) w[j] = j ? value_row(kv, row, d + 16, D) : x;
    else w[j] = bf ? pairs(widen32(kv, x, j), widen32(kv, y, j)) : widen32(kv, x, j);
  }
}
// Both as panels of `tile`: keys [n/32][words of D][32 positions], values [D/32][positions][32].
INLINE void pack(int kv, int bf, Rows *now, Rows *ahead, long D, char *keys, char *values) {
  long z = size_of(bf), y = size_of(kv), DP = round_up(D, NC);
  for (long t = 0; t < now->n; t += 16) for (long d = 0; d < D; d += 64 / y) {
    u32s w[16];
    if (d == 0) fetch(ahead);
    key_words(kv, now, t, d, D, w);
    char *to = keys + t / NC * NC * DP * z + d * NC * z + t % NC * 4;
    for (int i = 0; i < 16 && (kv == bf || d + i * 4 / y < DP); i++)
      for (int j = 0; j < z / y; j++, to += NC * 4) *(u32s *)to = widen(kv, bf, w[i], j);
  }
  for (long d = 0; d < D; d += NC) for (long i = 0; i < now->n * z / 4; i++) {
    value_words(kv, bf, now, i, d, D, (u32s *)(values + d * CHUNK * z + i * NC * 4));
    if (i % (4 * z) == 0) fetch(ahead);  // 16 positions
  }
}
#define PACK(kv) case kv: \
  if (size_of(kv) <= size_of(bf)) pack(kv, bf, now, ahead, D, keys, values); \
  break;
OUTLINE void pack_any(int kv, int bf, Rows *now, Rows *ahead, long D, char *keys, char *values) {
  switch (kv) { PACK(FP32) PACK(BF16) PACK(INT8) PACK(E4M3) PACK(E5M2) }
}
// One row of state is m, l and o[DP]. Not inlined: every merge must round alike.
OUTLINE void merge(float *to, float m1, float l1, const float *o1, long DP) {
  float m = to[0] > m1 ? to[0] : m1;
  f32s both = power16((f32s){to[0] - m, m1 - m}), old = splat(both[0]), new = splat(both[1]);
  for (long i = 0; i < DP; i += 16)
    *(f32s *)(to + 2 + i) = *(f32s *)(to + 2 + i) * old + *(const f32s *)(o1 + i) * new;
  to[0] = m;
  to[1] = to[1] * old[0] + l1 * new[0];
}
typedef struct {
  const char *q; char *out; Cache c; const int32_t *start, *lens, *table;
  long S, ld_table, H, KH, D, ldq, window; float scale, softcap; long G, DP, split, items;
} Attn;
// Dot products s[n] of one row, times the scale, are its scores; they become weights e^(s-m) in p.
// Scores and m are kept times log2 e, so that e^ is 2^. Of the weights, each 32 lie `step` bytes
// behind the last. Returns their sum. The row sees from..to-1. An int8 cache's scales come in here.
OUTLINE float softmax(int bf, const Attn *a, const Rows *rows, float *s, long n, int from, int to,
                      float *m, char *p, long step) {
  float cap = a->softcap, scale = a->scale * LOG2E;
  const f32s *k_scale = (const f32s *)rows->k_scale, *v_scale = (const f32s *)rows->v_scale;
  f32s top = splat(NEVER), sum = {}, *x = (f32s *)s;
  if (a->c.scales) for (long i = 0; i < n / 16; i++) x[i] *= k_scale[i];
  if (cap > 0) {  // cap tanh(x / cap)
    for (long i = 0; i < n / 16; i++)
      x[i] = cap * LOG2E * (1.f - 2.f / (power16(x[i] * (a->scale * 2 / cap * LOG2E)) + 1.f));
    scale = 1;
  }
  for (long t = 0; t < least(from, n); t++) s[t] = NEVER;
  for (long t = most(0, to); t < n; t++) s[t] = NEVER;
  for (long i = 0; i < n / 16; i++) top = larger(x[i], top);
  float shift = *m = lanes_max(top) * scale;
  if (from >= to) shift = 0;  // a row that sees nothing: weights e^NEVER = 0
  for (long i = 0; i < n / 16; i += 2, p += step) {
    f32s e = power_of_2(bf, x[i] * scale - shift), f = power_of_2(bf, x[i + 1] * scale - shift);
    sum += e + f;
    if (a->c.scales) { e *= v_scale[i]; f *= v_scale[i + 1]; }
    store32(bf, p, e, f);
    if (bf) {  // words of two, as values have them
      halves w = *(halves *)p;
      *(halves *)p = PICK(w, w, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9,
                          25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
  }
  return lanes_sum(sum);
}
// R rows of x times packed panels, for both products of a prompt's chunk ..
INLINE void times_panels(int R, int bf, const char *panels, const char *x, long ld, long K,
                         long columns, float *out, long ldo) {
  f32n c[ROWS][PARTS];
  for (long n = 0; n < columns; n += NC) {
    tile(bf, R, panels + n * ld * size_of(bf), x, ld, K, c);
    for (int r = 0; r < R; r++) memcpy(out + r * ldo + n, c[r], sizeof c[r]);
  }
}
// .. and straight from the cache, for a decode step: a word is used once, so storing it would not
// pay. The sums run in the same order: a token has the same bits in a prompt and in a decode step.
INLINE void scores_direct(int R, int bf, Rows *now, Rows *ahead, const char *q, long DP, long D,
                          float (*s)[CHUNK]) {
  for (long t = 0; t < now->n; t += 16) {
    f32n c[ROWS][16 / LANES] = {};
    for (long d = 0; d < D; d += 64 / size_of(bf)) {
      u32s w[16];
      key_words(bf, now, t, d, D, w);
      for (int i = 0; i < 16; i++) for (int r = 0; r < R; r++) for (int j = 0; j < 16 / LANES; j++)
        c[r][j] = multiply_add(bf, c[r][j], ((u32n *)(w + i))[j],
                               q + (r * DP + d) * size_of(bf) + 4 * i);
    }
    for (int r = 0; r < R; r++) memcpy(s[r] + t, c[r], sizeof c[r]);
    fetch(ahead);
  }
}
INLINE void weigh_direct(int R, int bf, Rows *now, Rows *ahead, const char *p, long DP, long D,
                         float *o) {
  for (long d = 0; d < DP; d += 2 * NC) {
    f32n c[ROWS][2 * PARTS] = {};
    for (long i = 0; i < now->n * size_of(bf) / 4; i++) {
      u32s w[4];
      value_words(bf, bf, now, i, d, D, w);
      value_words(bf, bf, now, i, d + NC, D, w + 2);
      for (int r = 0; r < R; r++) for (int j = 0; j < 2 * PARTS; j++)
        c[r][j] = multiply_add(bf, c[r][j], ((u32n *)w)[j], p + r * CHUNK * size_of(bf) + 4 * i);
      if (i % (4 * size_of(bf)) == 0) fetch(ahead);  // 16 positions
    }
    for (int r = 0; r < R; r++) memcpy(o + r * DP + d, c[r], least(DP - d, 2 * NC) * 4);
  }
}
typedef struct { const char *keys, *values; Rows *now, *ahead; } Chunk;
// `rows` query rows, padded to R, against one chunk; row r sees from[r]..to[r]-1.
INLINE void attend(int R, int bf, int direct, const Attn *a, const Chunk *c, const char *q,
                   long rows, long n, const int *from, const int *to, float *state) {
  float s[ROWS][CHUNK], o[ROWS * a->DP], m[ROWS], l[ROWS];
  char p[ROWS * CHUNK * 4];
  if (direct) scores_direct(R, bf, c->now, c->ahead, q, a->DP, a->D, s);
  else times_panels(R, bf, c->keys, q, a->DP, round_up(a->D, 2), n, s[0], CHUNK);
  for (int r = 0; r < R; r++)
    l[r] = softmax(bf, a, c->now, s[r], n, from[r], to[r], m + r, p + r * CHUNK * size_of(bf),
                   NC * size_of(bf));
  if (direct) weigh_direct(R, bf, c->now, c->ahead, p, a->DP, a->D, o);
  else times_panels(R, bf, c->values, p, CHUNK, n, a->DP, o, a->DP);
  for (int r = 0; r < rows; r++) merge(state + r * (a->DP + 2), m[r], l[r], o + r * a->DP, a->DP);
}
// The same with tiles, up to PAIR_ROWS rows: a prompt is no longer bound by its products but by the
// softmax between them. q is in tiles. A few rows alone are the work of attend_few.
OUTLINE void attend_tiles(const Attn *a, const Chunk *c, const char *q, long rows, long n,
                          const int *from, const int *to, float *state) {
  float s[PAIR_ROWS * most(CHUNK, a->DP)] LINES, *o = s;  // o takes the place of the scores
  float m[PAIR_ROWS], l[PAIR_ROWS];
  char p[PAIR_ROWS * CHUNK * 2] LINES;
  for (long t = 0; t < n; t += NC)
    pair_steps(1, rows > 16, q, 32 * a->DP, c->keys + t * a->DP * 2, a->DP / 32, 0, s + t, CHUNK);
  for (long r = 0; r < rows; r++)
    l[r] = softmax(BF16, a, c->now, s + r * CHUNK, n, from[r], to[r], m + r,
                   in_tiles(p, CHUNK * 2, 1, r, 0), A_TILE);
  for (long d = 0; d < a->DP; d += NC)
    pair_steps(1, rows > 16, p, 32 * CHUNK, c->values + d * CHUNK * 2, n / 32, 0, o + d, a->DP);
  for (long r = 0; r < rows; r++) merge(state + r * (a->DP + 2), m[r], l[r], o + r * a->DP, a->DP);
}
// ---- attention over the paged cache: the whole step ---------------------------------------------
// An item is some tokens of one sequence (up to 256 query rows) against one kv head, or all of them
// when the tokens are few, which reads the cache in order. Rows of an item go by kv head, then
// token, then query head of the group. Few items are cut further, one per chunk (`split`).
typedef struct { long s, h, heads, r0, r1, c0, c1, first; float *part; } Item;
INLINE long most_rows(const Attn *a) { return most(256, a->G); }
INLINE long rows_of(const Attn *a, const Item *w) { return (w->r1 - w->r0) * a->G * w->heads; }
INLINE long row_at(const Attn *a, const Item *w, long i, long per_token) {  // where row i begins
  long G = a->G, R = (w->r1 - w->r0) * G;
  return (a->start[w->s] + w->r0 + i % R / G) * per_token + ((w->h + i / R) * G + i % G) * a->D;
}
INLINE long row_pos(const Attn *a, long s, long row) {  // token `row` of this step's tokens of s
  return a->lens[s] - (a->start[s + 1] - a->start[s]) + row;
}
INLINE long first_seen(const Attn *a, long p) { return a->window ? most(0, p - a->window + 1) : 0; }
// Fills w (when given) with the work items and returns their count.
static long plan(const Attn *a, Item *w, float *part) {
  long count = 0, tokens = most(1, 256 / a->G);
  for (long s = 0; s < a->S; s++) {
    long L = a->start[s + 1] - a->start[s];
    long heads = L * a->H <= 128 && a->KH * a->DP <= 4096 ? a->KH : 1;  // see attend_few's memory
    for (long r0 = 0; r0 < L; r0 += tokens) {
      long r1 = least(L, r0 + tokens), end = row_pos(a, s, r1 - 1) + 1;
      long c0 = first_seen(a, row_pos(a, s, r0)) / CHUNK;
      long c1 = most(c0 + 1, (end + CHUNK - 1) / CHUNK);  // no position at all: an empty chunk
      long step = a->split ? 1 : c1 - c0;
      for (long h = 0; h < a->KH; h += heads)
        for (long c = c0; c < c1; c += step, count++) if (w) {
          w[count] = (Item){s, h, heads, r0, r1, c, least(c + step, c1), c == c0, part};
          if (a->split) part += rows_of(a, w + count) * (a->DP + 2);
        }
    }
  }
  return count;
}
static void clear(float *state, long rows, long DP) {
  memset(state, 0, rows * (DP + 2) * 4);
  for (long r = 0; r < rows; r++) state[r * (DP + 2)] = NEVER;
}
// Divides by the sum and writes the rows out. A row that saw nothing is 0.
INLINE void finish(int bf, const Attn *a, const Item *w, const float *state) {
  for (long i = 0; i < rows_of(a, w); i++, state += a->DP + 2) {
    char *out = a->out + row_at(a, w, i, a->H * a->D) * size_of(bf);
    f32s f = splat(state[1] == 0 ? 0.f : a->c.v_scale / state[1]);
    for (long d = 0; d < a->D; d += NC) {
      f32s x = *(const f32s *)(state + 2 + d) * f, y = *(const f32s *)(state + 2 + d + 16) * f;
      f32s low = PICK(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      f32s high = PICK(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      put(bf, out, d, a->D, a->c.kv == FP32 ? x : low);
      if (d + 16 < a->D) put(bf, out, d + 16, a->D, a->c.kv == FP32 ? y : high);
    }
  }
}
// The rows of chunk c in whole panels. Positions outside [lo, hi) are zeros: a slot that nobody
// wrote, or a block that left the window, may hold NaN, and 0 times NaN is NaN.
INLINE void find_rows(const Attn *a, const Item *w, long c, const char *zeros, Rows *r) {
  long lo = first_seen(a, row_pos(a, w->s, w->r0)), hi = row_pos(a, w->s, w->r1 - 1) + 1;
  long from = most(c * CHUNK, lo), offset = from % a->c.BS, y = size_of(a->c.kv);
  const int32_t *block_id = a->table + w->s * a->ld_table + from / a->c.BS;
  r->n = round_up(least(CHUNK, hi - c * CHUNK), NC);
  r->fetched = 0; r->bytes = w->heads * a->D * y; r->heads = w->heads;
  for (long t = 0; t < r->n; t++) {
    r->k[t] = r->v[t] = zeros;
    r->scale[t] = 0;
    if (c * CHUNK + t < lo || c * CHUNK + t >= hi) continue;
    long at = *block_id * a->c.block + offset * a->c.token + w->h * a->c.head;
    r->k[t] = a->c.data + at * y;
    r->v[t] = a->c.data + (at + a->c.plane) * y;
    if (a->c.scales) r->scale[t] = a->c.scales + (*block_id * a->c.BS + offset) * a->KH + w->h;
    if (++offset == a->c.BS) { offset = 0; block_id++; }
  }
}
INLINE void choose_head(const Attn *a, long h, Rows *r) {  // of those of the item
  r->at = h * a->c.head * size_of(a->c.kv);
  if (a->c.scales) for (long t = 0; t < r->n; t++) {
    const float *scale = r->scale[t] + h;
    r->k_scale[t] = r->scale[t] ? scale[0] : 0;
    r->v_scale[t] = r->scale[t] ? scale[a->c.plane / a->D] : 0;
  }
}
INLINE int direct(int bf, const Attn *a, const Item *w) {
  return ((bf && tiles) || a->c.kv == bf) && (w->r1 - w->r0) * a->G <= ROWS;
}
// Rows i.. of an item see from[r]..to[r]-1 of the n positions of chunk c. The last end of all.
INLINE long see(const Attn *a, const Item *w, long c, long i, long rows, long n, int *from,
                int *to) {
  long last = 0;
  for (long r = 0; r < rows; r++) {
    long pos = row_pos(a, w->s, w->r0 + (i + r) / a->G);
    from[r] = least(CHUNK, most(0, first_seen(a, pos) - c * CHUNK));
    to[r] = least(n, pos + 1 - c * CHUNK);
    last = most(last, to[r]);
  }
  return last;
}
// All query rows of one head of an item against one chunk, some at a time.
INLINE void run_chunk(int bf, const Attn *a, const Item *w, long c, const Chunk *ch,
                      const char *q, float *state) {
  long R = (w->r1 - w->r0) * a->G, n = ch->now->n, use_tiles = bf && tiles;
  long step = use_tiles ? PAIR_ROWS : ROWS;
  for (long i = 0; i < R; i += step) {
    int from[PAIR_ROWS] = {0}, to[PAIR_ROWS] = {0};
    long last = see(a, w, c, i, least(step, R - i), n, from, to);
    const char *qi = q + i * a->DP * size_of(bf);
    float *st = state + i * (a->DP + 2);
    if (use_tiles) {
      if (last) attend_tiles(a, ch, qi, least(step, R - i), round_up(last, NC), from, to, st);
    } else if (direct(bf, a, w)) WITH_R(R, attend, bf, 1, a, ch, qi, R, n, from, to, st)
    else if (last)
      attend(ROWS, bf, 0, a, ch, qi, least(ROWS, R - i), round_up(last, NC), from, to, st);
  }
}
// Up to 8 rows of a head, a decode step, take the cache as it lies if there are tiles. 16 keys are
// a left factor: S^T = K Q^T. 16 values are a right factor, over whose rows a product sums, but the
// two numbers of their words are two coordinates, not two positions. So the weights of a row are
// there twice, as words (w, 0), which sum the even coordinates, and (0, w) for the odd ones. The
// sums run in the order of a prompt, which pairs positions 16 apart: 32 positions at a time.
// Rows that are not 16 of bf16 in one block are copied: a last block, a narrower format.
typedef struct { const char *at[2]; long apart[2], head[2]; } Lines;  // two times 16 rows
INLINE void copy_lines(int kv, const Attn *a, long heads, const char *const *rows, char *to) {
  long head = a->c.head * size_of(kv);
  for (int i = 0; i < 16; i++) for (long h = 0; h < heads; h++) {
    const char *from = rows[i] + h * head;
    for (long d = 0; d < a->DP; d += 32, to += 64, from += 32 * size_of(kv)) {
      u32s part;
      if (kv == BF16 || a->D - d < 32) part = words(from, (a->D - d) * size_of(kv));
      if (kv == BF16) { *(u32s *)to = part; continue; }
      const char *x = a->D - d < 32 ? (const char *)&part : from;
      store32(BF16, to, load16(kv, x), load16(kv, x + 16));
    }
  }
}
#define COPY(kv) case kv: copy_lines(kv, a, heads, rows, copy[i]); break;
OUTLINE Lines find_lines(const Attn *a, long heads, const char *const *rows,
                         char (*copy)[heads * a->DP * 32]) {
  long apart = a->c.token * 2, whole = a->c.kv == BF16 && a->c.BS % 16 == 0 && a->D % 32 == 0;
  Lines l;
  for (int i = 0; i < 2; i++, rows += 16) {
    int lies = whole && rows[15] == rows[0] + 15 * apart;  // all 16 are seen
    if (!lies) switch (a->c.kv) { COPY(BF16) COPY(INT8) COPY(E4M3) COPY(E5M2) }
    l.at[i] = lies ? rows[0] : copy[i];
    l.apart[i] = lies ? apart : heads * a->DP * 2;
    l.head[i] = lies ? a->c.head * 2 : a->DP * 2;
  }
  __asm__ volatile("" ::: "memory");
  return l;
}
// Asks for rows i..end-1 of what is read in this order: n keys, n values, the next chunk's keys.
INLINE void fetch_rows(const Rows *now, const Rows *ahead, long n, long i, long end) {
  for (; i < least(end, 2 * n + ahead->n); i++) {
    const char *row = i < n ? now->k[i] : i < 2 * n ? now->v[i - n] : ahead->k[i - 2 * n];
    for (long b = 0; b < now->bytes; b += 64) __builtin_prefetch(row + b);
  }
}
OUTLINE void attend_few(const Attn *a, const Item *w, long c, Rows *now, Rows *ahead,
                        const char *q, float *state) {
  long R = (w->r1 - w->r0) * a->G, heads = w->heads, rows = heads * R, DP = a->DP;
  int from[ROWS], to[ROWS];
  long n = round_up(see(a, w, c, 0, R, now->n, from, to), NC);
  if (n == 0) return;
  float s[rows][CHUNK] LINES, o[rows][DP] LINES, sums[heads][most(32, DP / 2)][16] LINES;
  float m[rows], l[rows];
  char p[heads][CHUNK / 16][2 * R][64] LINES, copy[2][heads * DP * 32] LINES;
  for (long t = 0; t < n; t += 32) {
    Lines k = find_lines(a, heads, now->k + t, copy);
    for (long h = 0; h < heads; h++) {
      const char *at[2] = {k.at[0] + h * k.head[0], k.at[1] + h * k.head[1]};
      fetch_rows(now, ahead, n, t + 32 + 32 * h / heads, t + 32 + 32 * (h + 1) / heads);
      left_rows(at, k.apart, q + h * 32 * DP, DP / 32, sums[h][0]);
    }
    for (long h = 0; h < heads; h++) for (long r = 0; r < R; r++) for (int i = 0; i < 32; i++)
      s[h * R + r][t + i] = sums[h][i][r];
  }
  for (long h = 0; h < heads; h++) for (long r = 0; r < R; r++) {
    u32s both[CHUNK / 32];  // weights of two positions to a word
    if (r == 0) choose_head(a, h, now);
    l[h * R + r] = softmax(BF16, a, now, s[h * R + r], n, from[r], to[r], m + h * R + r,
                           (char *)both, 64);
    for (long i = 0; i < n / 16; i++) {
      u32s x = both[i / 2] << (i % 2 ? 0 : 16) >> 16;
      *(u32s *)p[h][i][r] = x;
      *(u32s *)p[h][i][R + r] = x << 16;
    }
  }
  for (long t = 0; t < n; t += 32) {
    Lines v = find_lines(a, heads, now->v + t, copy);
    for (long h = 0; h < heads; h++) {
      const char *at[2] = {v.at[0] + h * v.head[0], v.at[1] + h * v.head[1]};
      fetch_rows(now, ahead, n, n + t + 32 + 32 * h / heads, n + t + 32 + 32 * (h + 1) / heads);
      right_rows(at, v.apart, p[h][t / 16][0], 128 * R, DP / 32, sums[h][0]);
    }
    for (long r = 0; r < rows; r++) for (long d = 0; d < DP; d += 16) {
      f32s *to = (f32s *)(o[r] + d), x = *(f32s *)sums[r / R][d / 32 * 16 + d / 16 % 2 * R + r % R];
      if (t) *to += x; else *to = x;
    }
  }
  for (long r = 0; r < rows; r++) merge(state + r * (DP + 2), m[r], l[r], o[r], DP);
}
// `after` is the item that comes next, or 0. rows[*turn] are those of the first chunk, and will be
// those of the next item's.
INLINE void run_item(int bf, const Attn *a, const Item *w, const Item *after, char *space,
                     float *state, const char *zeros, Rows *rows, long *turn) {
  long DP = a->DP, z = size_of(bf), n = rows_of(a, w), R = n / w->heads;
  long use_tiles = bf && tiles, RP = use_tiles ? round_up(R, 16) : R;
  int few = use_tiles && direct(bf, a, w);
  char *keys = space, *values = keys + CHUNK * DP * z, *q = values + CHUNK * DP * z;
  if (!use_tiles) memset(q, 0, (n + ROWS) * DP * z);  // padded to DP and to whole groups
  for (long i = 0; i < n; i++) {
    const char *from = a->q + row_at(a, w, i, a->ldq) * z;
    if (few) {  // words of a tile are columns, a row has one of each
      char *to = q + i / R * 32 * DP + i % R * 4;
      if (i % R == 0) memset(to, 0, 32 * DP);
      for (long d = 0; d < a->D; d += 2) memcpy(to + d * 32, from + d * 2, least(a->D - d, 2) * 2);
    } else if (use_tiles) row_to_tiles(1, from, a->D, q, 2 * DP, i / R * RP + i % R);
    else memcpy(q + i * DP * z, from, a->D * z);
  }
  unsigned mode = use_tiles ? begin_tiles(few ? 2 * R : R, few) : 0;
  clear(state, n, DP);
  for (long c = w->c0; c < w->c1; c++) {
    Rows *now = rows + *turn, *ahead = rows + (*turn ^= 1);
    ahead->n = ahead->fetched = 0;
    if (c + 1 < w->c1) find_rows(a, w, c + 1, zeros, ahead);
    else if (after) find_rows(a, after, after->c0, zeros, ahead);
    ahead->heads = w->heads;
    if (few) { attend_few(a, w, c, now, ahead, q, state); continue; }
    Chunk ch = {keys, values, now, ahead};
    for (long h = 0; h < w->heads; h++) {
      choose_head(a, h, now);
      if (!direct(bf, a, w)) pack_any(a->c.kv, bf, now, ahead, a->D, keys, values);
      run_chunk(bf, a, w, c, &ch, q + h * RP * DP * z, state + h * R * (DP + 2));
    }
  }
  if (use_tiles) end_tiles(mode);
}
INLINE void attention(int bf, Team *t, const Attn *a) {
  long n = a->items, row = a->DP + 2, state_size = round_up(most_rows(a) * row * 4, 64);
  // Of this thread: panels, queries, rows of zeros; then the state, then the items.
  long queries = most_rows(a) + 16 * a->KH + ROWS;
  long space = round_up((2 * CHUNK + queries) * a->DP * size_of(bf), 64);
  long zeros_size = round_up(a->KH * a->c.head * size_of(a->c.kv), 64);
  char *mine = room(&own, space + zeros_size + state_size + n * sizeof(Item));
  char *zeros = memset(mine + space, 0, zeros_size);
  float *state = (float *)(zeros + zeros_size);
  Item *w = (Item *)((char *)state + state_size);
  plan(a, w, t->shared);
  Rows rows[2];
  long turn = 0, i = next(t);
  if (i < n) find_rows(a, w + i, w[i].c0, zeros, rows);
  for (long j; i < n; i = j) {
    j = next(t);
    run_item(bf, a, w + i, j < n ? w + j : 0, mine, a->split ? w[i].part : state, zeros, rows,
             &turn);
    if (!a->split) finish(bf, a, w + i, state);
  }
  if (!a->split) return;
  barrier(t);
  while ((i = next(t)) < n) if (w[i].first) {
    long rows = rows_of(a, w + i);
    clear(state, rows, a->DP);
    for (long j = i; j < n && (j == i || !w[j].first); j++) for (long r = 0; r < rows; r++) {
      float *part = w[j].part + r * row;
      merge(state + r * row, part[0], part[1], part + 2, a->DP);
    }
    finish(bf, a, w + i, state);
  }
}
// ---- entry --------------------------------------------------------------------------------------
// An Op is one operator call as data; the wrappers in kernels.py fill it. `rows`: how many tokens,
// and for attention how many sequences.
enum { NORM, SILU, ROPE, ARGMAX, EMBED, ATTENTION, LINEAR, NARROW };
typedef struct { int64_t kind, bf, rows; char *p[8]; int64_t n[15]; double f[4]; } Op;
typedef struct { Op op; Attn attn; Narrow narrow; } Task;  // an Op, made ready to run
// Every operator is a function of its own: the time that gcc needs grows with the square of the
// size of a function. And two compilers share the work: with BF=0 this file has the operators for
// fp32, with BF=1 those for bf16 and the entry.
#define OPERATOR(name, ...) OUTLINE void name(Team *t, const Task *task) { \
  enum { bf = BF }; const Op *o = &task->op; char *const *p = o->p; const int64_t *n = o->n; \
  long T = o->rows; (void)p, (void)n, (void)T; __VA_ARGS__; }
OPERATOR(norm, rms_norm(bf, t, p[0], p[1], p[2], p[3], T * n[0], n[0], n[1], n[2], n[3], n[4],
                        o->f[0]))
OPERATOR(silu, silu_mul(bf, t, p[0], p[1], T, n[0], n[1]))
OPERATOR(rope, rope_store(bf, t, p[0], (float *)p[1], p[2], n[5], (int64_t *)p[3],
                          (Cache){p[4], n[0], n[1], n[2], n[3], n[4], n[12], (float *)p[5], o->f[0],
                                  o->f[1]}, T, n[6], n[7], n[8], n[9], n[10], n[11]))
OPERATOR(largest, argmax(bf, t, p[0], (int64_t *)p[1], T, n[0], n[1]))
OPERATOR(look_up, embed(bf, t, n[7], &task->narrow, (int64_t *)p[0], (float *)p[7]))
OPERATOR(attend_all, attention(bf, t, &task->attn))
OPERATOR(dense, linear(bf, t, &(Dense){p[0], p[1], p[2], p[3], T, n[0], n[1], n[2], n[3], n[4],
                                       n[5]}))
OPERATOR(int4, narrow(bf, t, W4, &task->narrow))
OPERATOR(int8, narrow(bf, t, W8, &task->narrow))
OPERATOR(fp8, narrow(bf, t, WF8, &task->narrow))
OPERATOR(both8, narrow(bf, t, W8A8, &task->narrow))
#if BF
#define OPERATORS OPERATORS_BF16
#else
#define OPERATORS OPERATORS_FP32
#endif
typedef void Operator(Team *, const Task *);
extern Operator *const OPERATORS_FP32[], *const OPERATORS_BF16[];
Operator *const OPERATORS[] = {
  norm, silu, rope, largest, look_up, attend_all, dense, int4, int8, fp8, both8};
#if BF
// Estimated time on one thread in ns: arithmetic, and memory that is read.
static double cost(const Task *task) {
  const Op *o = &task->op;
  const int64_t *n = o->n;
  double T = o->rows, sum = 0;
  const Attn *a = &task->attn;
  switch (o->kind) {
    case NORM: return T * n[0] * n[1] / 2;
    case SILU: return T * n[0] / 3;
    case ROPE: return T * n[9];
    case ARGMAX: return T * n[0] / 16;
    case EMBED: return T * n[1];
    case LINEAR: return n[0] * (1 + n[5]) * n[1] * (1. / 16 + T * (2 - o->bf) / 250);
    case ATTENTION:
      for (long s = 0; s < a->S; s++)
        sum += a->lens[s] * ((a->start[s + 1] - a->start[s]) * a->H / 50. + a->KH * 0.75);
      return sum * a->D;
    default: return n[0] * (1 + n[7]) * n[1] * (bits_of(o->kind - NARROW) / 512. + T / 500);
  }
}
// The structures that two families of operators take. Returns the bytes that threads share.
static size_t prepare(Task *task) {
  const Op *o = &task->op;
  char *const *p = o->p;
  const int64_t *n = o->n;
  if (o->kind == LINEAR) return linear_shared(o->bf, o->rows, n[1]);
  if (o->kind == ATTENTION) {
    Cache c = {p[2], n[0], n[1], n[2], n[3], n[4], n[11], (float *)p[6], 1, o->f[2]};
    task->attn = (Attn){p[0], p[1], c, (int32_t *)p[3], (int32_t *)p[4], (int32_t *)p[5], o->rows,
                        n[5], n[6], n[7], n[8], n[9], n[10], o->f[0], o->f[1], n[6] / n[7],
                        round_up(n[8], NC), 0, 0};
  }
  if (o->kind < NARROW && o->kind != EMBED) return 0;
  task->narrow = (Narrow){p[0], p[1], p[2], p[3], p[4], (int64_t *)p[5], p[6], o->rows, n[0], n[1],
                          n[2], n[3], n[4], n[5], n[6], n[7]};
  if (o->kind == EMBED) { task->narrow.KP = round_up(n[1], 8); return 0; }
  size_up(o->bf, o->kind - NARROW, &task->narrow);
  return ready_size(&task->narrow, o->rows);
}
// Few items of attention are cut further; their partial results are shared.
static size_t split(Task *task, int threads) {
  Attn *a = &task->attn;
  a->split = threads > 1 && plan(a, 0, 0) < 4 * threads;
  a->items = plan(a, 0, 0);
  return a->split ? a->items * most_rows(a) * (a->DP + 2) * 4 : 0;
}
// Runs the operators one after the other in one parallel region: between two of them threads meet
// in a barrier, which takes half a microsecond, while waking one up takes 50. `tokens` and
// `sequences` replace the rows of every operator of a recorded step; -1 keeps them. Work that takes
// less than a waking is done by the caller alone.
void run(const Op *ops, long count, long tokens, long sequences) {
  Task *tasks = (Task *)room(&list, count * sizeof(Task));
  size_t shared = 0;
  double ns = 0;
  for (long i = 0; i < count; i++) {
    tasks[i].op = ops[i];
    if (tokens >= 0) tasks[i].op.rows = ops[i].kind == ATTENTION ? sequences : tokens;
    shared = most(shared, prepare(tasks + i));
    ns += cost(tasks + i);
  }
  int threads = ns < 60000 ? 1 : omp_get_max_threads();
  for (long i = 0; i < count; i++)
    if (ops[i].kind == ATTENTION) shared = most(shared, split(tasks + i, threads));
  Team t = {.shared = (float *)room(&common, shared)};
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (long i = 0; i < count; i++) {
    Operator *run_op = (ops[i].bf ? OPERATORS_BF16 : OPERATORS_FP32)[ops[i].kind];
    if (tasks[i].op.rows) run_op(&t, tasks + i);
    if (i + 1 < count) barrier(&t);
  }
}
#endif
