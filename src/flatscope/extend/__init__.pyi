"""Names for those who add to flatscope, 40 at most: each stays what it is until a major version says otherwise.

`docs/how-to/extend.md` says what each is for: measures and bounds, weights, the structure of a network, estimates,
results, sections of the report, and what all of these are written with. `flatscope_papers` is made with these names.
"""

from flatscope.curvature.symmetric_operator import SymmetricOperator as SymmetricOperator
from flatscope.disk import read_file as read_file
from flatscope.disk import write_whole as write_whole
from flatscope.formatting import numbered as numbered
from flatscope.formatting import typeset as typeset
from flatscope.formatting import written as written
from flatscope.input_checks import usable_device as usable_device
from flatscope.isolation import coarse_products as coarse_products
from flatscope.isolation import own_settings as own_settings
from flatscope.lazy_names import lazy_names as lazy_names
from flatscope.network.interception import Operation as Operation
from flatscope.network.interception import replay as replay
from flatscope.network.interception import tensors_in as tensors_in
from flatscope.network.interception import watched as watched
from flatscope.network.interception import with_tensors as with_tensors
from flatscope.network.layers import Layer as Layer
from flatscope.network.operations import TABLE as TABLE
from flatscope.network.units import Graph as Graph
from flatscope.params import Params as Params
from flatscope.params import count_scalars as count_scalars
from flatscope.params import flatten as flatten
from flatscope.params import unflatten as unflatten
from flatscope.progress import progress_bar as progress_bar
from flatscope.registry import PAPERS as PAPERS
from flatscope.registry import Value as Value
from flatscope.registry import bound as bound
from flatscope.registry import declarations as declarations
from flatscope.registry import measure as measure
from flatscope.reports.kinds import Kind as Kind
from flatscope.reports.markup import PagePart as PagePart
from flatscope.reports.markup import Section as Section
from flatscope.reports.markup import element as element
from flatscope.result import DrawnResult as DrawnResult
from flatscope.result import Result as Result
from flatscope.samples import output_tensor as output_tensor
from flatscope.sampling import Draws as Draws
from flatscope.sampling import Sampler as Sampler
from flatscope.sampling import draw_until_precise as draw_until_precise
from flatscope.sampling import sample_until as sample_until
from flatscope.symmetries.folding import has_batchnorm as has_batchnorm
