/* Steps of fields by polynomials of patches, and the test whether all patches are in the trust region.
   Torch twins: `Patches` in patches.py, `PatchRegion` in patch_region.py, `step_loop` in core/chunks.py.

   Besides the macros of polynomial.c, which comes before this file, the compiler is told the grid, CELLS_0
   to CELLS_2 (1 for axes that are not there) and CHANNELS (also OUTPUTS), the cells GHOST_0 to GHOST_2 that
   patches reach beyond it, POLYNOMIALS (one per axis, or 1 without fluxes), FIRST_AXIS, SIZE (the cells of a
   patch), EXTRA (further inputs: parameters and phase) and PHASE (0 or 2), and whether values are FLUXES,
   there are WALLS, and steps are GUARDED (0 or 1 each).

   Each trajectory takes all its steps at once, with its field in the first caches. A vector holds
   neighbouring cells of a row. The field is copied into a larger one with ghost cells around it, so that
   the cells of a patch are at constant distances. */

#include <stdlib.h>
#include <string.h>

#define CELLS (CELLS_0 * CELLS_1 * CELLS_2)
#define WIDTH_0 (CELLS_0 + 2 * GHOST_0)
#define WIDTH_1 (CELLS_1 + 2 * GHOST_1)
#define ROW (CELLS_2 + 2 * GHOST_2 + BLOCK) /* vectors may read beyond the last cell */
#define PADDED (WIDTH_0 * WIDTH_1 * ROW)
#define FLUX_ROW (CELLS_2 + BLOCK)

typedef struct {
  const T *weight, *bias;    /* [POLYNOMIALS, CHANNELS, TERMS] and [POLYNOMIALS, CHANNELS] */
  const T *centre, *scale;   /* [POLYNOMIALS, INPUTS] */
  const T *mean, *factor;    /* [POLYNOMIALS, SIZE] and [POLYNOMIALS, SIZE, SIZE], rows of a triangle */
  const T *limit;            /* [POLYNOMIALS] */
  const long long *distance; /* [POLYNOMIALS, SIZE], of the cells of a patch in the padded field */
} Model;

typedef struct {
  T *padded;    /* [CHANNELS, WIDTH_0, WIDTH_1, ROW] */
  T *flux;      /* [CHANNELS, CELLS_0, CELLS_1, FLUX_ROW] */
  int *ghost_2; /* [2 GHOST_2], the cells whose values the ghosts of a row have */
} Work;

static inline int source_of(int i, int n) { /* the cell that cell i is, or a ghost is a copy of */
  if (!WALLS) return ((i % n) + n) % n;
  i = ((i % (2 * n)) + 2 * n) % (2 * n);
  return i < n ? i : 2 * n - 1 - i;
}

static void fill_padded(const Work *work, const T *u) {
  for (int c = 0; c < CHANNELS; c++)
    for (int i = 0; i < WIDTH_0; i++)
      for (int j = 0; j < WIDTH_1; j++) {
        int from_0 = source_of(i - GHOST_0, CELLS_0), from_1 = source_of(j - GHOST_1, CELLS_1);
        const T *from = u + ((c * CELLS_0 + from_0) * (long long)CELLS_1 + from_1) * CELLS_2;
        T *to = work->padded + ((c * WIDTH_0 + i) * (long long)WIDTH_1 + j) * ROW;
        memcpy(to + GHOST_2, from, CELLS_2 * sizeof(T));
        for (int k = 0; k < GHOST_2; k++) {
          to[k] = from[work->ghost_2[k]];
          to[GHOST_2 + CELLS_2 + k] = from[work->ghost_2[GHOST_2 + k]];
        }
      }
}

static inline void load_patch(const Model *model, int p, const T *first, Block *x) {
  for (int s = 0; s < SIZE; s++) memcpy(&x[s], first + model->distance[p * SIZE + s], sizeof(Block));
}

#define EACH_BLOCK                                                                                      \
  for (int i = 0; i < CELLS_0; i++)                                                                     \
    for (int j = 0; j < CELLS_1; j++)                                                                   \
      for (int k = 0; k < CELLS_2; k += BLOCK)

static inline const T *cell(const Work *work, int i, int j, int k) {
  return work->padded + ((i + GHOST_0) * (long long)WIDTH_1 + j + GHOST_1) * ROW + k + GHOST_2;
}

/* Whether all patches of the padded field are in the region. */
static int is_inside(const Model *model, const Work *work) {
  for (int p = 0; p < POLYNOMIALS; p++) {
    const T *mean = model->mean + p * SIZE, *factor = model->factor + p * SIZE * SIZE;
    EACH_BLOCK {
      Block x[SIZE], distance;
      load_patch(model, p, cell(work, i, j, k), x);
      EACH(v, VECTORS) distance.vectors[v] = (Vector){0};
      for (int s = 0; s < SIZE; s++) EACH(v, VECTORS) x[s].vectors[v] -= mean[s];
      for (int s = 0; s < SIZE; s++) {
        Vector sum[VECTORS] = {{0}};
        for (int r = 0; r <= s; r++)
          EACH(v, VECTORS) sum[v] += factor[s * SIZE + r] * x[r].vectors[v];
        EACH(v, VECTORS) distance.vectors[v] += sum[v] * sum[v];
      }
      int outside = 0;
      for (int s = 0; s < BLOCK && k + s < CELLS_2; s++)
        outside |= !(distance.numbers[s] <= model->limit[p]);
      if (outside) return 0;
    }
  }
  return 1;
}

/* Add the values of polynomial p, or the differences of its fluxes, to the field u. */
static void add_values(const Model *model, const Work *work, int p, const T *extra, T *u) {
  const T *weight = model->weight + (long long)p * CHANNELS * TERMS, *bias = model->bias + p * CHANNELS;
  const T *centre = model->centre + p * INPUTS, *scale = model->scale + p * INPUTS;
  EACH_BLOCK {
    Block z[INPUTS], value[CHANNELS];
    load_patch(model, p, cell(work, i, j, k), z);
    for (int s = 0; s < EXTRA; s++) EACH(v, VECTORS) z[SIZE + s].vectors[v] = extra[s] - (Vector){0};
    for (int s = 0; s < INPUTS; s++) EACH(v, VECTORS)
      z[s].vectors[v] = (z[s].vectors[v] - centre[s]) * scale[s];
    for (int c = 0; c < CHANNELS; c++) EACH(v, VECTORS) value[c].vectors[v] = (Vector){0};
    add_polynomial(weight, bias, z, value);
    for (int c = 0; c < CHANNELS; c++)
      memcpy(work->flux + ((c * CELLS_0 + i) * (long long)CELLS_1 + j) * FLUX_ROW + k, &value[c],
             sizeof(Block));
  }
  int axis = FIRST_AXIS + p;
  for (int c = 0; c < CHANNELS; c++)
    for (int i = 0; i < CELLS_0; i++)
      for (int j = 0; j < CELLS_1; j++) {
        T *to = u + ((c * CELLS_0 + i) * (long long)CELLS_1 + j) * CELLS_2;
        const T *above = work->flux + ((c * CELLS_0 + i) * (long long)CELLS_1 + j) * FLUX_ROW;
        if (!FLUXES) {
          for (int k = 0; k < CELLS_2; k++) to[k] += above[k];
          continue;
        }
        if (axis == 2) {
          T last = WALLS ? 0 : above[CELLS_2 - 1];
          to[0] += last - (WALLS && CELLS_2 == 1 ? 0 : above[0]);
          for (int k = 1; k < CELLS_2 - 1; k++) to[k] += above[k - 1] - above[k];
          if (CELLS_2 > 1) to[CELLS_2 - 1] += above[CELLS_2 - 2] - last;
          continue;
        }
        int at = axis == 0 ? i : j, n = axis == 0 ? CELLS_0 : CELLS_1;
        int from = at ? at - 1 : n - 1; /* the cell below */
        const T *below = work->flux +
          ((c * CELLS_0 + (axis == 0 ? from : i)) * (long long)CELLS_1 + (axis == 1 ? from : j)) * FLUX_ROW;
        T up = WALLS && at == n - 1 ? 0 : 1, down = WALLS && at == 0 ? 0 : 1;
        for (int k = 0; k < CELLS_2; k++) to[k] += down * below[k] - up * above[k];
      }
}

/* Take up to `count` steps of one trajectory, whose field u [CHANNELS, CELLS] they change, and return how
   many were taken: with `stops`, only those before it is outside. */
static long long advance(const Model *model, const Work *work, const T *parameters, const T *phases, T *u,
                         unsigned char *inside, unsigned char *stayed, long long count, int stops) {
  T extra[EXTRA + 1];
  for (int s = 0; s < EXTRA - PHASE; s++) extra[s] = parameters[s];
  *stayed = *inside = 1;
  long long taken = 0;
  for (;; taken++) {
    if (taken < count || GUARDED) fill_padded(work, u);
    if (GUARDED) *inside = is_inside(model, work);
    if ((stops && !*inside) || taken == count) break;
    *stayed &= *inside;
    for (int s = 0; s < PHASE; s++) extra[EXTRA - PHASE + s] = phases[taken * PHASE + s];
    for (int p = 0; p < POLYNOMIALS; p++) add_values(model, work, p, extra, u);
  }
  return taken;
}

/* Take up to `count` steps of n trajectories, fewer if one of them leaves, and return how many; -1 if there
   is no memory.

   u and out [n, CHANNELS * CELLS], parameters [n, EXTRA - PHASE], phases [count, PHASE]; anywhere, inside
   and stayed [n]. `inside` is of the fields in out. */
long long steps(const T *u, const T *parameters, const T *phases, T *out, const T *weight, const T *bias,
                const T *centre, const T *scale, const T *mean, const T *factor, const T *limit,
                const long long *distance, const unsigned char *anywhere, unsigned char *inside,
                unsigned char *stayed, long long n, long long count, int threads) {
  Model model = {weight, bias, centre, scale, mean, factor, limit, distance};
  const long long size = (long long)CHANNELS * CELLS;
  long long least = count;
  int failed = 0;
  for (int pass = 0; pass < 2; pass++) {
    long long most = least;
    if (pass && most == count) break; /* otherwise all trajectories take as many steps */
#pragma omp parallel num_threads(threads) if (threads > 1 && n > 1)
    {
      Work work = {calloc((size_t)CHANNELS * PADDED, sizeof(T)),
                   calloc((size_t)CHANNELS * CELLS_0 * CELLS_1 * FLUX_ROW, sizeof(T)),
                   calloc(2 * GHOST_2 + 1, sizeof(int))};
      int ready = work.padded && work.flux && work.ghost_2;
      for (int k = 0; ready && k < GHOST_2; k++) {
        work.ghost_2[k] = source_of(k - GHOST_2, CELLS_2);
        work.ghost_2[GHOST_2 + k] = source_of(CELLS_2 + k, CELLS_2);
      }
#pragma omp for schedule(static) reduction(min : least) reduction(| : failed)
      for (long long i = 0; i < n; i++) {
        if (!ready) {
          failed = 1;
          continue;
        }
        memcpy(out + i * size, u + i * size, size * sizeof(T));
        long long taken = advance(&model, &work, parameters + i * (EXTRA - PHASE), phases, out + i * size,
                                  inside + i, stayed + i, most, !pass && !anywhere[i]);
        least = taken < least ? taken : least;
      }
      free(work.padded), free(work.flux), free(work.ghost_2);
    }
  }
  return failed ? -1 : least;
}
