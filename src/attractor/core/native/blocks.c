/* Steps of a scheme for blocks of trajectories. T is float or double, LANES the trajectories of a block.
   Functions of the step are written for one lane, and compilers make vectors of the loops over lanes. */
#define EACH_LANE _Pragma("omp simd") for (int s = 0; s < LANES; s++)
#define VECTOR_BYTES 64
#define VECTORS (LANES * (int)sizeof(T) / VECTOR_BYTES)
typedef T Block[LANES] __attribute__((aligned(VECTOR_BYTES)));
typedef double Wide[LANES] __attribute__((aligned(VECTOR_BYTES)));
typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
#ifdef VECTOR_MATH
#define OF_VECTORS __attribute__((simd("notinbranch"), const))
#else
#define OF_VECTORS __attribute__((const))
#endif

/* out = weights z, where the weight of row r and column i is weights[r * row + i * column]. */
static inline void product(const T *weights, long row, long column, int rows, int columns,
                           const Block *z, Block *out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    Vector sum[4][VECTORS] = {{{0}}};
    for (int i = 0; i < columns; i++)
      for (int q = 0; q < 4; q++)
        for (int v = 0; v < VECTORS; v++)
          sum[q][v] += weights[(r + q) * row + i * column] * ((const Vector *)z[i])[v];
    for (int q = 0; q < 4; q++)
      for (int v = 0; v < VECTORS; v++) ((Vector *)out[r + q])[v] = sum[q][v];
  }
  for (; r < rows; r++) {
    Vector sum[VECTORS] = {{0}};
    for (int i = 0; i < columns; i++)
      for (int v = 0; v < VECTORS; v++)
        sum[v] += weights[r * row + i * column] * ((const Vector *)z[i])[v];
    for (int v = 0; v < VECTORS; v++) ((Vector *)out[r])[v] = sum[v];
  }
}
