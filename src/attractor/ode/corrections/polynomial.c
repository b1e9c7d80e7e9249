/* Polynomials of blocks of numbers, which `polynomial_kernel.c` and `patches_kernel.c` share. Torch twin:
   `Monomials` in polynomial.py.

   The compiler is told T (float or double), INPUTS, OUTPUTS, VECTORS (in a block), DEGREE, STRIDE (2 if
   only odd degrees occur, else 1), TERMS (the number of monomials) and LOWER (of those below DEGREE). */

#define BYTES 64
#define LANES (BYTES / (int)sizeof(T))
#define BLOCK (LANES * VECTORS)
#define UNROLL _Pragma("GCC unroll 64")
#define EACH(index, count) UNROLL for (int index = 0; index < count; index++)

typedef T Vector __attribute__((vector_size(BYTES)));
typedef union {
  Vector vectors[VECTORS];
  T numbers[BLOCK];
} Block;

/* Add the polynomial of z [INPUTS] to u [OUTPUTS]. Monomials of one degree that start with component i are z_i
   times those of the previous degree that start with i or later, which are neighbours; odd ones are a
   product of two components times those two degrees below. */
static inline void add_polynomial(const T *weight, const T *bias, const Block *z, Block *u) {
  Block kept[LOWER], sum[OUTPUTS];
  EACH(o, OUTPUTS) EACH(v, VECTORS) sum[o].vectors[v] = u[o].vectors[v] + bias[o];

  int starts[INPUTS], row = 0, term = 0;
  for (int i = 0; i < INPUTS; i++, term++) {
    starts[i] = row;
    if (DEGREE > 1) kept[row++] = z[i];
    EACH(o, OUTPUTS) EACH(v, VECTORS)
      sum[o].vectors[v] += weight[o * TERMS + term] * z[i].vectors[v];
  }
  for (int degree = 1 + STRIDE; degree <= DEGREE; degree += STRIDE) {
    int stop = row, keep = degree < DEGREE;
    for (int i = 0; i < INPUTS; i++) {
      int next = row;
      for (int j = i; j < (STRIDE == 2 ? INPUTS : i + 1); j++) {
        Vector factor[VECTORS];
        EACH(v, VECTORS)
          factor[v] = STRIDE == 2 ? z[i].vectors[v] * z[j].vectors[v] : z[i].vectors[v];
        for (int r = starts[j]; r < stop; r++, term++) {
          Vector m[VECTORS];
          EACH(v, VECTORS) m[v] = factor[v] * kept[r].vectors[v];
          if (keep) {
            EACH(v, VECTORS) kept[row].vectors[v] = m[v];
            row++;
          }
          EACH(o, OUTPUTS) EACH(v, VECTORS) sum[o].vectors[v] += weight[o * TERMS + term] * m[v];
        }
      }
      starts[i] = next;
    }
  }
  EACH(o, OUTPUTS) EACH(v, VECTORS) u[o].vectors[v] = sum[o].vectors[v];
}
