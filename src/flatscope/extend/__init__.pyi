"""Names for those who add to flatscope: each stays what it is until a major version says otherwise.

A measure or a bound needs the first group, an operation or a question of structure the second, a way to find
curvature or an estimate the third, a kind of result and its section of the report the fourth; the fifth is what
everything here is written with. `flatscope_papers` is made with these names.
"""

from flatscope.curvature.symmetric_operator import SymmetricOperator as SymmetricOperator
from flatscope.disk import MOST_TEXT as MOST_TEXT
from flatscope.disk import read_file as read_file
from flatscope.disk import write_whole as write_whole
from flatscope.disk import write_with_sum as write_with_sum
from flatscope.formatting import numbered as numbered
from flatscope.formatting import typeset as typeset
from flatscope.formatting import written as written
from flatscope.input_checks import usable_device as usable_device
from flatscope.isolation import coarse_products as coarse_products
from flatscope.isolation import own_settings as own_settings
from flatscope.lazy_names import lazy_names as lazy_names
from flatscope.network.layers import Layer as Layer
from flatscope.network.operations import TABLE as TABLE
from flatscope.network.products import LAYER_CALLS as LAYER_CALLS
from flatscope.network.products import NORM_ORDER as NORM_ORDER
from flatscope.network.program import Program as Program
from flatscope.network.units import Graph as Graph
from flatscope.network.watching import Operation as Operation
from flatscope.network.watching import Rule as Rule
from flatscope.network.watching import is_in_place as is_in_place
from flatscope.network.watching import replay as replay
from flatscope.network.watching import tensors_in as tensors_in
from flatscope.network.watching import watched as watched
from flatscope.network.watching import with_tensors as with_tensors
from flatscope.params import Params as Params
from flatscope.params import count as count
from flatscope.params import flatten as flatten
from flatscope.params import named_parameters as named_parameters
from flatscope.params import unflatten as unflatten
from flatscope.progress import progress as progress
from flatscope.registry import PAPERS as PAPERS
from flatscope.registry import Value as Value
from flatscope.registry import bound as bound
from flatscope.registry import declarations as declarations
from flatscope.registry import measure as measure
from flatscope.reports.kinds import Kind as Kind
from flatscope.reports.markup import Colours as Colours
from flatscope.reports.markup import Part as Part
from flatscope.reports.markup import Section as Section
from flatscope.reports.markup import fragment as fragment
from flatscope.reports.markup import source as source
from flatscope.result import DrawnResult as DrawnResult
from flatscope.result import Result as Result
from flatscope.samples import output_tensor as output_tensor
from flatscope.samples import parts_of as parts_of
from flatscope.sampling import Draws as Draws
from flatscope.sampling import Sampler as Sampler
from flatscope.sampling import draw_until_precise as draw_until_precise
from flatscope.sampling import sample_until as sample_until
from flatscope.symmetries.folding import has_batchnorm as has_batchnorm
from flatscope.symmetries.path_skeleton import edge_classes as edge_classes
