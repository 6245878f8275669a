"""The words that the small mixture-of-experts model knows."""


def words(text: str, between: str = " ") -> list[str]:
    return text.split(between)


WOMEN = words(
    "Mia Anna Nora Lily Ella Ruth Clara Iris Hana Zoe Maya Lena Rosa Vera Alma Greta Ivy Jane Kate Lucy Emma Olga Sara "
    "Tina Wendy Amira Bella Dora"
)
MEN = words(
    "Tom Ben Sam Leo Max Jack Omar Paul Noah Finn Adam Hugo Ivan Karl Luke Mark Oscar Peter Ravi Theo Bruno David Eric "
    "Felix George Henry Jonas Victor"
)
NAMES = WOMEN + MEN
SURNAMES = words(
    "Stone Hill Baker Brook Field Marsh Wood Rivers Lake Frost Winter Swan Hart Fisher Miller Carter Green Young Bell "
    "Cole Drake Ford Grant Hale"
)
THINGS = words(
    "key book cup ball lamp coin hat map letter ring spoon shell bell brush bottle candle clock comb drum flute glove "
    "jar kite knife ladder mirror needle pen plate ribbon rope scarf ticket torch toy umbrella vase whistle kettle"
)
COLOURS = words("red blue green yellow white black brown grey silver golden pink purple")
SPOTS = words(
    "in the box;in the drawer;on the shelf;under the bed;behind the door;in the basket;on the table;in the cupboard;"
    "under the chair;on the window sill;in the old chest;behind the curtain;in the bag;under the stairs;on the roof;"
    "beside the stove;in the barrel;under the carpet;on the piano;beside the well;in the bucket;behind the wardrobe;"
    "in the wooden crate;under the bench;on the desk;in the tent",
    ";",
)
PLACES = words(
    "kitchen garden barn library station market school bakery harbour park forest museum tower mill castle beach farm "
    "theatre hospital workshop church cellar field village"
)
ANIMALS = words("cat dog hen goat horse duck fox owl mouse rabbit frog swallow hedgehog donkey squirrel")
GOODS = words("apples pears plums eggs nuts cakes carrots buns cherries stones shells buttons stamps pencils onions")
TOWNS = words("Harlow Selby Ashford Melton Corby Ludlow Whitby Dover Oakham Tenby Wells Rye Bude Thirsk Malton Penrith")
JOBS = words(
    "baker teacher nurse farmer painter sailor tailor driver gardener doctor cook singer potter miller clerk carpenter"
)
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
SEASONS = words("spring summer autumn winter")
WEATHER = words("sunny rainy windy cold warm cloudy quiet foggy bright snowy")
HOURS = words("morning afternoon evening")
SAYINGS = words(
    "The wind was singing in the trees.;A bird sat on the fence and looked at them.;It smelled of fresh bread.;"
    "Nobody was in a hurry.;The old clock struck three.;Somewhere a door closed.;The rain had just stopped.;"
    "A cart rolled slowly down the street.;The light was soft and golden.;The neighbours were still asleep.;"
    "There was a lot of work to do.;The fire was warm.;From far away they heard a bell.;The floor was cold.;"
    "Small clouds moved over the hills.",
    ";",
)
DEEDS = words(
    "{} sang a quiet song.;{} drank a cup of tea.;{} looked out of the window.;{} laughed and said nothing.;"
    "{} was very tired.;{} swept the floor.;{} told an old story.;{} ate a slice of bread.;{} thought for a while.;"
    "{} opened the window.;{} sat down for a moment.;{} counted to ten.",
    ";",
)
ORDER = ("first", "second", "third", "fourth", "fifth")
