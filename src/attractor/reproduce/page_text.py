"""Fixed texts of the pages of results and claims."""

HEAD = """# Results

Tables and figures of the papers, run again on real data: what the paper reports beside what we
measured, under the paper's protocol and under a fair one, with the verdict on each. [The
claims](claims.md) are one table per paper; this page is its appendix. Numbers are means over seeds,
"±" their standard deviation; of errors, which differ by factors, the geometric mean, and "×÷" the
factor of one standard deviation.

This page is made by `attractor reproduce --page docs/results.md` from the files in
experiments/results.

"""
RULES = """## How claims are judged

Direction and size are separate questions.

**Direction.** A claim is one comparison or several, each an effect that is positive if it goes the
paper's way. One comparison is *supported* if the 95 % confidence interval of the effect lies above
0, *contradicted* if it lies below 0, and else *inconclusive*: a significant lag is treated like a
significant lead, and an insignificant lag like an insignificant lead. The interval is Student's,
over the differences at the same seeds; of one seed it takes the deviation of other runs of the same
kind, if there are any, and their degrees of freedom. A claim is supported if all its comparisons
are, each at 95 %, and contradicted if one of them is, at 95 % for all of them together
(Bonferroni). So either word is wrong at most once in forty times. A training that is much shorter
than the paper's, and a check that cannot fail, leave a claim inconclusive. *Not run: no data* means
that what the experiment needs is not at hand. "So far": seeds or arms are still missing.

**Size.** The measured share of the claimed effect, with its 95 % interval; ratios are compared by
their logarithms. *Smaller*: the interval lies below 100 %. *Larger*: it lies above. *As claimed*:
it contains 100 % and not 0. *Opposite*: it lies below 0. *Unclear*: it contains 0 and 100 %. Where
the paper prints no number there is no size. Of a claim with several comparisons the table shows
their mean, or the one with the least lead where something is said to be best.

**These rules were changed after the results were known.** Before, one word was given for both
questions: "holds", "holds in direction" for an insignificant lead or a small effect, "cannot be
tested" for an insignificant lag, "does not hold". Under equal arms half of all verdicts then
favoured the paper. No run was made or left out for the change. Changed beside that: an arm that is
said to be best is compared with every other one; a training that is too short speaks for neither
side, where it could support a claim in direction; epochs of half of the data count as epochs
(attns-fig4); what untrained networks pass as well (stepnet-fig6) and a bound that no error could
exceed (attns-theorem51) support nothing; the Longformer is judged where no token sees the future
(pde-table3); thresholds of single runs are Student's; claims with several parts are judged part by
part. [A simulation with equal arms](trust.md#verdicts-under-equal-arms) shows how often each word
occurs by chance.

Of the 50 experiments of that day the former rules gave 9 "holds", 12 "holds in direction", 10 "does
not hold", 16 "cannot be tested" and 3 no word; the present ones gave 11 supported, 10 contradicted,
22 inconclusive, 4 not run and 3 no word. From "does not hold" to supported went pde-table3, to
inconclusive pde-table1; from "holds" to inconclusive attns-theorem51 and stepnet-fig6; to
contradicted went attns-fig4 ("cannot be tested") and pde-mixing ("holds in direction"). Of the
other 11 "holds in direction" 3 are supported and 8 inconclusive.

"""
COVERAGE = """## Coverage

The tables and figures of the papers that show results. *With all of its training*: as long as the
paper's, as far as it is known, with all arms that are judged. *Partly*: a shorter training, a smaller
model, or some of the rows. *On small data*: on data that come with the library, too small for a verdict.
"""
CLAIMS = """# Claims

What the papers say, and what we measured. Each row is a claim; its name leads to all numbers. [How
claims are judged](#how-claims-are-judged) is below the tables. An effect is positive, or a factor
above 1, if it goes the paper's way; brackets are 95 % confidence intervals. "Training" is the share
of the paper's training: of its epochs, or for language models of the tokens of its 20 epochs. The
AttNS paper prints no epochs; 100 % are the 500 of the code of NeurVec, which it names.

This page is made by `attractor reproduce --page docs/results.md` from the files in
experiments/results.

"""
