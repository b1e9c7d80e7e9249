/* Rounds under error control, as attractor.core.rounds describes them, for blocks of trajectories.

   Times, step sizes and errors are of type double. The functions rate, attempt, estimate, interpolant and
   norm are written for each equation and scheme. */

/* What a call is made with: states [STATE, n], parameters [PARAMETERS, n], times [times] or [times, n],
   states at these times [times, STATE, n], and other arrays [n]. */
typedef struct {
  const T *parameters;
  const double *shortest, *rtol, *atol, *wanted;
  const T *const *memory;
  const double *t, *h;
  const T *u, *k;
  const double *error;
  const unsigned char *active;
  const signed char *status;
  const long long *accepted, *rejected;
  double *new_t, *new_h;
  T *new_u, *new_k;
  double *new_error;
  unsigned char *new_active;
  signed char *new_status;
  long long *new_accepted, *new_rejected;
  T *states;
  long long *upcoming;    /* the index of the next wanted time */
  unsigned char *inside;  /* [limit], 1 for rounds with states inside of steps */
  long long n, times, each, limit;  /* each: 1 if trajectories have times of their own, otherwise 0 */
  double sign, least, most, safety, grow, shrink, beta, exponent;
} Call;

static inline double smaller(double x, double y) { return x < y ? x : y; }
static inline double larger(double x, double y) { return x > y ? x : y; }

/* Return x rounded to twelve bits, so that the last bit of a power does not matter. */
static inline double rounded(double x) {
  long long bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  bits = (bits + (1LL << 40)) & ~((1LL << 41) - 1);
  __builtin_memcpy(&x, &bits, sizeof(bits));
  return x;
}

static inline double wanted_time(const Call *c, long long index, long long row) {
  return c->wanted[c->each ? index * c->n + row : index];
}

/* Set norms of errors, which are divided by the allowed errors. */
static inline void measure(const Wide *errors, const Block *u, const Block *u1, const Wide *rtol,
                           const Wide *atol, Wide *out) {
  Wide ratio[STATE];
  for (int i = 0; i < STATE; i++) EACH_LANE {
      double x = __builtin_fabs((double)u[i][s]), y = __builtin_fabs((double)u1[i][s]);
      double allowed = atol[i][s] + rtol[i][s] * larger(x, y);
      ratio[i][s] = errors[i][s] == 0 ? 0 : errors[i][s] / allowed;
    }
  norm((const Wide *)ratio, out, 0);
}

/* Take rounds of the trajectories from `first` on, and return how many were taken. */
static long long advance(const Call *call, long long first) {
  const Call c = *call;
  Block u[STATE], k[KNOWN * STATE], p[PARAMETERS + 1], u1[STATE], inner[COEFFICIENTS * STATE];
  Block time[1], size[1];
  Wide t, h, error, goal, shortest, rtol[STATE], atol[STATE], step, end, errors[STATE], now[1], next_time;
  int arrives[LANES], minimal[LANES], finite[LANES], active[LANES], status[LANES], passes[LANES];
  long long accepted[LANES], rejected[LANES], upcoming[LANES], last = c.times - 1;
  Block *k1 = k + LAST * STATE;
  int lanes = c.n - first < LANES ? (int)(c.n - first) : LANES;
  for (int s = 0; s < LANES; s++) { /* the last trajectory stands in for those beyond it */
    long long from = first + (s < lanes ? s : lanes - 1);
    for (int i = 0; i < STATE; i++) {
      u[i][s] = c.u[i * c.n + from];
      k[i][s] = c.k[i * c.n + from];
      rtol[i][s] = c.rtol[i * c.n + from];
      atol[i][s] = c.atol[i * c.n + from];
    }
    for (int i = 0; i < PARAMETERS; i++) p[i][s] = c.parameters[i * c.n + from];
    t[s] = c.t[from], h[s] = c.h[from], error[s] = c.error[from], shortest[s] = c.shortest[from];
    active[s] = s < lanes && c.active[from], status[s] = c.status[from];
    accepted[s] = c.accepted[from], rejected[s] = c.rejected[from], upcoming[s] = c.upcoming[from];
    goal[s] = wanted_time(call, LANDS && upcoming[s] < last ? upcoming[s] : last, from);
    next_time[s] = wanted_time(call, upcoming[s] < last ? upcoming[s] : last, from);
  }
  long long taken = 0;
  for (; taken < c.limit; taken++) {
    int any = 0;
    for (int s = 0; s < LANES; s++) any |= active[s];
    if (!any) break;
    int reaches = 0; /* whether a step may end at or behind a wanted time */
    EACH_LANE {
      double later = t[s] + h[s];
      arrives[s] = active[s] & ((goal[s] - later) * c.sign <= 0);
      double change = arrives[s] ? goal[s] - t[s] : later - t[s]; /* what the clock can tell */
      step[s] = active[s] ? change : 0;
      minimal[s] = smaller(__builtin_fabs(step[s]), __builtin_fabs(h[s])) <= c.least;
      end[s] = arrives[s] ? goal[s] : t[s] + step[s];
      time[0][s] = (T)t[s];
      size[0][s] = (T)step[s];
      finite[s] = 1;
    }
    attempt((const Block *)time, (const Block *)size, (const Block *)u, k, (const Block *)p, u1, c.memory);
    for (int i = 0; i < STATE; i++)
      EACH_LANE finite[s] &= (u1[i][s] - u1[i][s] == 0) & (k1[i][s] - k1[i][s] == 0);
    estimate((const Block *)size, (const Block *)k, errors);
    measure((const Wide *)errors, (const Block *)u, (const Block *)u1, (const Wide *)rtol,
            (const Wide *)atol, now);
#ifdef TWO_ESTIMATES
    Wide lower[1];
    estimate_lower((const Block *)size, (const Block *)k, errors);
    measure((const Wide *)errors, (const Block *)u, (const Block *)u1, (const Wide *)rtol,
            (const Wide *)atol, lower);
    EACH_LANE { /* error^2 / hypot(error, lower / 10), without overflow */
      double x = now[0][s], y = 0.1 * lower[0][s];
      double high = larger(x, y), low = smaller(x, y), part = low / high;
      double length = high * __builtin_sqrt(1 + part * part);
      now[0][s] = x == 0 ? 0 : x * (x / length);
    }
#endif
    EACH_LANE passes[s] = active[s] & finite[s] & ((now[0][s] <= 1) | minimal[s]);
    for (int s = 0; s < LANES; s++) reaches |= passes[s] & ((next_time[s] - end[s]) * c.sign <= 0);
    int known = 0; /* whether the interpolant is */
    for (int s = 0; reaches && s < lanes; s++) {
      long long row = first + s;
      for (; passes[s] && upcoming[s] <= last; upcoming[s]++) {
        double at = wanted_time(call, upcoming[s], row);
        if ((at - end[s]) * c.sign > 0) break;
        T theta = (T)((at - t[s]) / step[s]);
        if (theta != 1 && !known) {
          interpolant((const Block *)time, (const Block *)size, (const Block *)u, (const Block *)u1, k,
                      (const Block *)p, inner, c.memory);
          known = c.inside[taken] = 1;
        }
        T *out = c.states + upcoming[s] * STATE * c.n + row;
        next_time[s] = wanted_time(call, upcoming[s] < last ? upcoming[s] + 1 : last, row);
        for (int i = 0; i < STATE; i++) {
          T value = u1[i][s];
          if (theta != 1) {
            value = inner[(COEFFICIENTS - 1) * STATE + i][s];
            for (int j = COEFFICIENTS - 1; j > 0; j--)
              value = inner[(j - 1) * STATE + i][s] + (j % 2 ? 1 - theta : theta) * value;
            value = u[i][s] + theta * value;
            if (value - value != 0) value = (1 - theta) * u[i][s] + theta * u1[i][s];
          }
          out[i * c.n] = value;
        }
      }
    }
    EACH_LANE {
      double x = now[0][s], previous = larger(error[s], 1e-4);
      double factor = c.safety * pow(x, -c.exponent);
      if (PI_CONTROL) factor *= pow(previous, c.beta);
      factor = factor == factor && finite[s] ? factor : c.shrink;
      factor = rounded(larger(smaller(factor, c.grow), c.shrink));
      int done = passes[s] & (upcoming[s] > last);
      double next = step[s] * factor, before = h[s];
      /* Where steps end at wanted times, one that was cut short says little about the next one. */
      if (LANDS) next = passes[s] & arrives[s] & (__builtin_fabs(next) < __builtin_fabs(before)) ? before : next;
      next = larger(smaller(__builtin_fabs(active[s] ? next : before), c.most), c.least);
      double reached = passes[s] ? end[s] : t[s];
      int vanished = next <= __builtin_fabs(reached) * (4 * 2.220446049250313e-16) + shortest[s];
      int stopped = active[s] & (vanished | (minimal[s] & !passes[s])) & !done;
      status[s] = stopped ? (finite[s] ? STEP_UNDERFLOW : LOST) : status[s];
      accepted[s] += passes[s];
      rejected[s] += active[s] & !passes[s];
      error[s] = PI_CONTROL && passes[s] ? x : error[s];
      active[s] = active[s] & !done & !stopped;
      t[s] = reached;
      h[s] = next * c.sign;
    }
    for (int i = 0; i < STATE; i++) EACH_LANE {
        u[i][s] = passes[s] ? u1[i][s] : u[i][s];
        k[i][s] = passes[s] ? k1[i][s] : k[i][s];
      }
    for (int s = 0; LANDS && s < lanes; s++)
      goal[s] = wanted_time(call, upcoming[s] < last ? upcoming[s] : last, first + s);
  }
  for (int s = 0; s < lanes; s++) {
    long long to = first + s;
    for (int i = 0; i < STATE; i++) c.new_u[i * c.n + to] = u[i][s], c.new_k[i * c.n + to] = k[i][s];
    c.new_t[to] = t[s], c.new_h[to] = h[s], c.new_error[to] = error[s];
    c.new_active[to] = active[s] != 0, c.new_status[to] = (signed char)status[s];
    c.new_accepted[to] = accepted[s], c.new_rejected[to] = rejected[s], c.upcoming[to] = upcoming[s];
  }
  return taken;
}

/* Take rounds until every trajectory has reached its last time or was given up, at most `limit`, and
   return how many were taken. */
long long rounds(const Call *call, int threads) {
  long long most = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1 && call->n > 4 * LANES) \
    reduction(max : most) schedule(dynamic)
  for (long long first = 0; first < call->n; first += LANES) {
    long long taken = advance(call, first);
    most = taken > most ? taken : most;
  }
  return most;
}
