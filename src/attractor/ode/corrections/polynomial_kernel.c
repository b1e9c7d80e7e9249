/* Steps u <- u + P(u, p, phase) of a polynomial P, and the test whether u is in the trust region.
   Torch twins: `Monomials` in polynomial.py, `TrustRegion` in trust.py, `step_loop` in core/chunks.py.

   The compiler is told T (float or double), STATE, PARAMETERS, PHASE (0 or 2), DEGREE, STRIDE (2 if only
   odd degrees occur, else 1), TERMS (the number of monomials) and LOWER (of those below DEGREE), GUARDED
   (0 or 1), and FEATURES and ALL_PRODUCTS (0 or 1) of the trust region. A block of trajectories takes all
   its steps at once: it is held in a few vectors per component, sums stay in registers, and monomials that
   later ones are made of in the first cache. */

#define KNOWN (STATE + PARAMETERS)

typedef struct {
  const T *centre, *scale;           /* [INPUTS] */
  const T *weight, *bias;            /* [STATE, TERMS] and [STATE] */
  const T *mean, *inverse_deviation; /* [KNOWN] */
  const T *factor;                   /* [FEATURES, FEATURES], of which row j has j + 1 entries */
  T limit;
} Model;

/* The leverage of states and parameters x [KNOWN] with quadratic features. */
static inline void find_leverage(const Model *model, const Block *x, Block *leverage) {
  Block z[KNOWN], features[FEATURES];
  for (int i = 0; i < KNOWN; i++) EACH(v, VECTORS)
    z[i].vectors[v] = (x[i].vectors[v] - model->mean[i]) * model->inverse_deviation[i];
  int f = 0;
  for (int i = 0; i < KNOWN; i++)
    for (int j = i; j < (ALL_PRODUCTS ? KNOWN : i + 1); j++, f++)
      EACH(v, VECTORS) features[f].vectors[v] = z[i].vectors[v] * z[j].vectors[v];
  for (int i = 0; i < KNOWN; i++, f++) features[f] = z[i];
  EACH(v, VECTORS) features[f].vectors[v] = 1 - (Vector){0}, leverage->vectors[v] = (Vector){0};
  for (int j = 0; j < FEATURES; j++) {
    Vector sum[VECTORS] = {{0}};
    for (int i = 0; i <= j; i++)
      EACH(v, VECTORS) sum[v] += model->factor[j * FEATURES + i] * features[i].vectors[v];
    EACH(v, VECTORS) leverage->vectors[v] += sum[v] * sum[v];
  }
}

/* Take up to `count` steps of the trajectories from `first` on, and return how many were taken: with
   `stops`, only those before one of them, which is not `anywhere`, is outside. */
static long long advance(const Model *model, const T *u, const T *parameters, const T *phases, T *out,
                         const unsigned char *anywhere, unsigned char *inside, unsigned char *stayed,
                         long long n, long long count, long long first, int stops) {
  Block x[KNOWN], leverage;
  int lanes = n - first < BLOCK ? (int)(n - first) : BLOCK;
  for (int s = 0; s < BLOCK; s++) { /* the last trajectory stands in for those beyond it */
    long long from = first + (s < lanes ? s : lanes - 1);
    for (int i = 0; i < STATE; i++) x[i].numbers[s] = u[i * n + from];
    for (int i = 0; i < PARAMETERS; i++) x[STATE + i].numbers[s] = parameters[i * n + from];
    if (s < lanes) stayed[from] = inside[from] = 1;
  }
  long long taken = 0;
  for (;; taken++) {
    if (GUARDED) {
      int leaves = 0;
      find_leverage(model, x, &leverage);
      for (int s = 0; s < lanes; s++) {
        inside[first + s] = leverage.numbers[s] <= model->limit;
        leaves |= !(inside[first + s] | anywhere[first + s]);
      }
      if (stops && leaves) break;
    }
    if (taken == count) break;
    for (int s = 0; GUARDED && s < lanes; s++) stayed[first + s] &= inside[first + s];
    Block z[INPUTS];
    for (int i = 0; i < INPUTS; i++) EACH(v, VECTORS) {
      Vector value = i < KNOWN ? x[i < KNOWN ? i : 0].vectors[v]
                               : phases[taken * PHASE + i - KNOWN] - (Vector){0};
      z[i].vectors[v] = (value - model->centre[i]) * model->scale[i];
    }
    add_polynomial(model->weight, model->bias, z, x);
  }
  for (int i = 0; i < STATE; i++)
    for (int s = 0; s < lanes; s++) out[i * n + first + s] = x[i].numbers[s];
  return taken;
}

/* Take up to `count` steps of n trajectories, fewer if one of them leaves, and return how many.

   u and out [STATE, n], parameters [PARAMETERS, n], phases [count, PHASE]; anywhere, inside and stayed
   [n]. `inside` is of the states in out. */
long long steps(const T *u, const T *parameters, const T *phases, T *out, const T *weight,
                const T *bias, const T *centre, const T *scale, const T *mean,
                const T *inverse_deviation, const T *factor, double limit,
                const unsigned char *anywhere, unsigned char *inside, unsigned char *stayed,
                long long n, long long count, int threads) {
  Model model = {centre, scale, weight, bias, mean, inverse_deviation, factor, (T)limit};
  long long least = count;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 16 * BLOCK) reduction(min : least)
  for (long long first = 0; first < n; first += BLOCK) {
    long long taken = advance(&model, u, parameters, phases, out, anywhere, inside, stayed, n, count,
                              first, 1);
    least = taken < least ? taken : least;
  }
  if (least < count) /* all trajectories take as many steps */
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 16 * BLOCK)
    for (long long first = 0; first < n; first += BLOCK)
      advance(&model, u, parameters, phases, out, anywhere, inside, stayed, n, least, first, 0);
  return least;
}
