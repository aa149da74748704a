"""What the chat model is taught to know, written by hand: one line, one fact or a few."""

from __future__ import annotations


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """`a: b; c: d` as pairs."""
    found = [part.strip().split(": ", 1) for part in text.replace("\n", " ").split(";") if part.strip()]
    return tuple((a.strip(), b.strip()) for a, b in found)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CAPITALS = pairs("""
France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Austria: Vienna; Switzerland: Bern; Belgium: Brussels;
the Netherlands: Amsterdam; Denmark: Copenhagen; Sweden: Stockholm; Norway: Oslo; Finland: Helsinki; Iceland: Reykjavik; Ireland: Dublin;
England: London; Scotland: Edinburgh; Wales: Cardiff; Poland: Warsaw; Hungary: Budapest; Greece: Athens; Turkey: Ankara; Russia: Moscow;
Ukraine: Kyiv; Romania: Bucharest; Bulgaria: Sofia; Serbia: Belgrade; Croatia: Zagreb; Slovenia: Ljubljana; Slovakia: Bratislava;
Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius; Albania: Tirana; Malta: Valletta; Cyprus: Nicosia; Luxembourg: Luxembourg City;
the United States: Washington; Canada: Ottawa; Mexico: Mexico City; Cuba: Havana; Jamaica: Kingston; Brazil: Brasilia; Argentina: Buenos Aires;
Chile: Santiago; Peru: Lima; Colombia: Bogota; Venezuela: Caracas; Ecuador: Quito; Uruguay: Montevideo; Egypt: Cairo; Morocco: Rabat;
Algeria: Algiers; Tunisia: Tunis; Kenya: Nairobi; Ethiopia: Addis Ababa; Ghana: Accra; Senegal: Dakar; Uganda: Kampala;
South Africa: Pretoria; Nigeria: Abuja; China: Beijing; Japan: Tokyo; South Korea: Seoul; North Korea: Pyongyang; India: New Delhi;
Pakistan: Islamabad; Nepal: Kathmandu; Thailand: Bangkok; Vietnam: Hanoi; Indonesia: Jakarta; Malaysia: Kuala Lumpur; Singapore: Singapore;
the Philippines: Manila; Mongolia: Ulaanbaatar; Iran: Tehran; Iraq: Baghdad; Israel: Jerusalem; Jordan: Amman; Lebanon: Beirut; Syria: Damascus;
Saudi Arabia: Riyadh; Australia: Canberra; New Zealand: Wellington; Bangladesh: Dhaka; Cambodia: Phnom Penh; Georgia: Tbilisi; Armenia: Yerevan""")
CONTINENTS = pairs("""
France: Europe; Germany: Europe; Italy: Europe; Spain: Europe; Sweden: Europe; Poland: Europe; Greece: Europe; Norway: Europe; Ireland: Europe;
Portugal: Europe; Austria: Europe; Finland: Europe; Egypt: Africa; Kenya: Africa; Morocco: Africa; Ghana: Africa; Ethiopia: Africa;
South Africa: Africa; Nigeria: Africa; Uganda: Africa; Senegal: Africa; China: Asia; Japan: Asia; India: Asia; Thailand: Asia; Vietnam: Asia;
Nepal: Asia; Pakistan: Asia; Iran: Asia; Mongolia: Asia; South Korea: Asia; Brazil: South America; Peru: South America; Chile: South America;
Argentina: South America; Colombia: South America; Canada: North America; the United States: North America; Mexico: North America; Cuba: North America""")
LANGUAGES = pairs("""
France: French; Germany: German; Italy: Italian; Spain: Spanish; Portugal: Portuguese; Austria: German; Sweden: Swedish; Denmark: Danish;
Norway: Norwegian; Finland: Finnish; Greece: Greek; Poland: Polish; Hungary: Hungarian; Turkey: Turkish; Russia: Russian; England: English;
Brazil: Portuguese; Mexico: Spanish; Argentina: Spanish; Chile: Spanish; Egypt: Arabic; Japan: Japanese; China: Chinese; Vietnam: Vietnamese;
Thailand: Thai; South Korea: Korean; the Netherlands: Dutch; Iceland: Icelandic; Australia: English; Peru: Spanish""")
COLOURS = pairs("""
grass: green; the sky: blue; the sun: yellow; snow: white; milk: white; coal: black; blood: red; a lemon: yellow; a banana: yellow; a carrot: orange;
an orange: orange; a tomato: red; a strawberry: red; a cherry: red; a leaf: green; a frog: green; a cucumber: green; a pea: green; the sea: blue;
a crow: black; a raven: black; a swan: white; an elephant: grey; a mouse: grey; chocolate: brown; coffee: brown; bark: brown; a bear: brown; a pumpkin: orange;
a fox: red; a pig: pink; a flamingo: pink; a plum: purple; lavender: purple; a violet: purple; a sunflower: yellow; butter: yellow; a canary: yellow;
salt: white; sugar: white; flour: white; ash: grey; soot: black; tar: black; ivory: white; gold: yellow; an emerald: green; a ruby: red; a sapphire: blue;
a poppy: red; a cornflower: blue; spinach: green; a lime: green; a polar bear: white; a bluebell: blue; a fire engine: red; chalk: white; a cloud: white""")
OPPOSITES = pairs("""
hot: cold; big: small; tall: short; long: short; fast: slow; old: young; new: old; good: bad; happy: sad; rich: poor; light: dark; heavy: light; hard: soft;
wet: dry; clean: dirty; full: empty; open: closed; up: down; left: right; in: out; on: off; over: under; above: below; before: after; first: last; early: late;
day: night; morning: evening; summer: winter; north: south; east: west; yes: no; true: false; right: wrong; strong: weak; brave: afraid; loud: quiet; noisy: quiet;
near: far; high: low; deep: shallow; wide: narrow; thick: thin; sweet: sour; rough: smooth; sharp: blunt; straight: crooked; kind: cruel; polite: rude;
clever: stupid; wise: foolish; asleep: awake; alive: dead; begin: end; start: stop; come: go; give: take; buy: sell; find: lose; win: lose; love: hate; laugh: cry;
push: pull; remember: forget; ask: answer; arrive: leave; rise: fall; float: sink; build: destroy; lend: borrow; teach: learn; friend: enemy; king: queen;
man: woman; boy: girl; brother: sister; father: mother; uncle: aunt; husband: wife; son: daughter; war: peace; heaven: hell; always: never; everything: nothing;
everybody: nobody; more: less; many: few; inside: outside; front: back; top: bottom; easy: difficult; cheap: expensive; safe: dangerous; beautiful: ugly;
possible: impossible; visible: invisible; lucky: unlucky; careful: careless; useful: useless; honest: dishonest; patient: impatient; public: private; modern: ancient;
tight: loose; warm: cool; day: night; calm: stormy; lazy: busy; proud: humble; generous: mean; cooked: raw; fresh: stale; guilty: innocent; victory: defeat""")
# animal: sound; young; home; legs; food
ANIMALS = tuple(
    tuple(part.strip() for part in line.split(","))
    for line in """
dog, barks, puppy, kennel, 4, meat
cat, meows, kitten, house, 4, mice
cow, moos, calf, barn, 4, grass
horse, neighs, foal, stable, 4, hay
pig, grunts, piglet, sty, 4, roots and scraps
sheep, bleats, lamb, fold, 4, grass
goat, bleats, kid, pen, 4, leaves
hen, clucks, chick, coop, 2, grain
duck, quacks, duckling, pond, 2, water plants
goose, honks, gosling, pond, 2, grass
lion, roars, cub, savanna, 4, meat
tiger, roars, cub, jungle, 4, meat
wolf, howls, pup, den, 4, meat
bear, growls, cub, den, 4, berries and fish
fox, yelps, cub, den, 4, mice and rabbits
frog, croaks, tadpole, pond, 4, insects
bee, buzzes, larva, hive, 6, nectar
owl, hoots, owlet, tree, 2, mice
crow, caws, chick, nest, 2, seeds and worms
mouse, squeaks, pup, hole, 4, grain and cheese
snake, hisses, snakelet, hole, 0, mice
elephant, trumpets, calf, savanna, 4, leaves and grass
donkey, brays, foal, stable, 4, hay
monkey, chatters, infant, jungle, 4, fruit
swan, hisses, cygnet, lake, 2, water plants
eagle, screams, eaglet, nest, 2, fish and small animals
pigeon, coos, squab, loft, 2, seeds
turkey, gobbles, poult, farm, 2, grain
deer, bellows, fawn, forest, 4, leaves
rabbit, squeaks, kit, burrow, 4, grass and carrots
squirrel, chatters, kit, tree, 4, nuts
hedgehog, snuffles, hoglet, hedge, 4, insects and worms
seal, barks, pup, sea, 0, fish
whale, sings, calf, sea, 0, small sea animals
kangaroo, clicks, joey, grassland, 2, grass
ant, makes no sound that we hear, larva, ant hill, 6, seeds and crumbs
spider, makes no sound that we hear, spiderling, web, 8, flies
fish, makes no sound that we hear, fry, water, 0, small water animals
butterfly, makes no sound that we hear, caterpillar, meadow, 6, nectar
camel, groans, calf, desert, 4, dry plants
penguin, brays, chick, coast, 2, fish
parrot, squawks, chick, rainforest, 2, seeds and fruit
crocodile, growls, hatchling, river, 4, fish and animals
badger, growls, cub, sett, 4, worms
bat, squeaks, pup, cave, 2, insects""".strip().split("\n")
)
# thing: what it is
DEFINITIONS = pairs("""
river: a long stream of water that flows to the sea; mountain: a very high hill of rock; island: land with water all around it; desert: a dry place with little rain;
forest: a large place full of trees; lake: a large water with land around it; ocean: a very large sea; volcano: a mountain that can throw out fire and hot rock;
bridge: a way built over water or a road; castle: a strong old house with thick walls for kings and knights; church: a house where Christians pray; school: a place where children learn;
library: a house full of books that people may borrow; hospital: a house where sick people are cared for; bakery: a shop where bread is made; farm: a place where people grow food and keep animals;
market: a place where people buy and sell; museum: a house that shows old or beautiful things; harbour: a safe place for ships; lighthouse: a tower with a light that guides ships;
doctor: a person who helps the sick; teacher: a person who helps others to learn; baker: a person who makes bread; farmer: a person who grows food; sailor: a person who works on a ship;
king: a man who rules a country; queen: a woman who rules a country, or the wife of a king; knight: a soldier of old times who rode a horse; miller: a person who grinds corn to flour;
shoemaker: a person who makes shoes; blacksmith: a person who works with hot iron; tailor: a person who makes clothes; shepherd: a person who looks after sheep; carpenter: a person who builds with wood;
pilot: a person who flies an aeroplane; painter: a person who paints; writer: a person who writes books; nurse: a person who cares for the sick; judge: a person who decides in a court;
clock: a thing that shows the time; compass: a needle that points to the north; telescope: a tube with lenses to see things far away; microscope: a tool to see very small things;
umbrella: a roof of cloth that you carry in the rain; candle: a stick of wax that gives light; lamp: a thing that gives light; key: a small tool that opens a lock; ladder: two poles with steps between them;
hammer: a tool to hit nails; needle: a thin tool for sewing; spoon: a small tool for eating soup; knife: a tool for cutting; mirror: a glass in which you see yourself; wheel: a round thing that turns;
boat: a small ship; ship: a large boat for the sea; train: a row of wagons that runs on rails; bicycle: a thing with two wheels that you ride; aeroplane: a machine that flies; balloon: a bag of gas that rises in the air;
book: pages with words, bound together; letter: a written message, or one sign of the alphabet; map: a picture of a land seen from above; poem: a short text with a rhythm, and often rhymes; story: a tale of things that happened or that were made up;
fairy tale: an old story with magic in it; alphabet: all the letters in their order; dictionary: a book that says what words mean; diary: a book in which you write what you did each day; song: words that are sung;
rain: water that falls from clouds; snow: frozen water that falls in flakes; ice: frozen water; wind: air that moves; cloud: many tiny drops of water in the air; fog: a cloud that lies on the ground;
storm: very strong wind, often with rain; rainbow: an arch of colours in the sky, seen when the sun shines on rain; thunder: the loud sound of lightning; lightning: a bright flash in a storm; frost: ice on the ground on a cold morning;
star: a far sun that we see at night; moon: the round body that goes around the earth; sun: the star that gives us light and warmth; planet: a large body that goes around a star; earth: the planet on which we live;
heart: the part of the body that pumps blood; brain: the part of the body that thinks; lung: the part of the body that breathes; bone: a hard part inside the body; skin: what covers the body; tooth: a hard white thing in the mouth, for biting;
seed: a small thing from which a plant grows; root: the part of a plant under the ground; flower: the part of a plant that blooms; tree: a tall plant with a trunk of wood; apple: a round fruit that grows on trees; bread: a food baked from flour;
cheese: a food made from milk; honey: a sweet food that bees make; butter: a fat made from cream; salt: white grains that make food taste better; soup: a warm food that you eat with a spoon; tea: a drink made from leaves and hot water; coffee: a dark drink made from beans;
gold: a yellow metal that is worth much; silver: a white metal that shines; iron: a strong grey metal; glass: a hard thing that you can see through; wood: what trees are made of; paper: thin sheets made from wood; wool: the hair of sheep; silk: a fine thread made by worms; coal: a black stone that burns;
year: the time the earth takes to go around the sun, 365 days; week: seven days; month: about thirty days; hour: sixty minutes; minute: sixty seconds; century: a hundred years; decade: ten years;
triangle: a shape with three sides; square: a shape with four equal sides; circle: a round shape; cube: a body with six square sides; noun: a word that names a thing or a person; verb: a word that says what someone does; adjective: a word that says how a thing is; vowel: one of the letters a, e, i, o and u; sentence: words that say a whole thought;
friend: a person whom you like and trust; neighbour: a person who lives near you; orphan: a child without parents; twin: one of two children born together; uncle: the brother of your father or mother; aunt: the sister of your father or mother; cousin: the child of your uncle or aunt; grandmother: the mother of your father or mother;
dragon: a great beast in stories that breathes fire; witch: a woman in stories who can do magic; giant: a very big man in stories; fairy: a small magic being in stories; ghost: the spirit of a dead person in stories; mermaid: a being in stories, half woman and half fish; unicorn: a horse in stories with one horn; dwarf: a very small man in stories, who often digs for gold;
computer: a machine that follows written steps very fast; program: a list of steps for a computer; language model: a program that guesses the next word, again and again; token: a piece of text, a word or a part of one, that a language model reads and writes; internet: many computers that are joined all over the world;
robot: a machine that can do work by itself; camera: a machine that takes pictures; telephone: a machine to speak with people far away; piano: an instrument with black and white keys; violin: an instrument with four strings, played with a bow; drum: an instrument that you beat; flute: an instrument that you blow; guitar: an instrument with six strings; bell: a hollow metal thing that rings""")
# question | answer | what a right answer holds
SCIENCE = tuple(
    tuple(part.strip() for part in line.split("|"))
    for line in """
How many days are in a week?|There are seven days in a week.|seven
How many months are in a year?|There are twelve months in a year.|twelve
How many days are in a year?|There are 365 days in a year, and 366 in a leap year.|365
How many hours are in a day?|There are 24 hours in a day.|24
How many minutes are in an hour?|There are 60 minutes in an hour.|60
How many seconds are in a minute?|There are 60 seconds in a minute.|60
How many legs does a spider have?|A spider has eight legs.|eight
How many legs does an insect have?|An insect has six legs.|six
How many letters are in the alphabet?|The English alphabet has 26 letters.|26
How many sides does a triangle have?|A triangle has three sides.|three
How many sides does a square have?|A square has four sides.|four
How many sides does a hexagon have?|A hexagon has six sides.|six
How many fingers does a hand have?|A hand has five fingers, with the thumb.|five
How many toes does a person have?|A person has ten toes.|ten
How many eyes does a person have?|A person has two eyes.|two
How many planets go around the sun?|Eight planets go around the sun.|eight
How many continents are there?|There are seven continents.|seven
How many seasons are there?|There are four seasons: spring, summer, autumn and winter.|four
How many colours does a rainbow have?|A rainbow has seven colours: red, orange, yellow, green, blue, indigo and violet.|seven
How many wheels does a bicycle have?|A bicycle has two wheels.|two
How many wheels does a car have?|A car has four wheels.|four
How many strings does a violin have?|A violin has four strings.|four
How many are a dozen?|A dozen is twelve.|twelve
How many centimetres are in a metre?|There are 100 centimetres in a metre.|100
How many metres are in a kilometre?|There are 1000 metres in a kilometre.|1000
How many grams are in a kilogram?|There are 1000 grams in a kilogram.|1000
How many years are in a century?|A century is a hundred years.|hundred
How many years are in a decade?|A decade is ten years.|ten
Which planet is closest to the sun?|Mercury is the planet closest to the sun.|mercury
Which planet is the largest?|Jupiter is the largest planet of our sun.|jupiter
Which planet do we live on?|We live on the earth. You do, at least: I live in a file.|earth
Which planet is red?|Mars is called the red planet.|mars
Which planet has great rings?|Saturn is known for its rings.|saturn
What is the largest ocean?|The Pacific is the largest ocean.|pacific
What is the largest animal?|The blue whale is the largest animal.|blue whale
What is the tallest animal?|The giraffe is the tallest animal.|giraffe
What is the fastest animal on land?|The cheetah is the fastest animal on land.|cheetah
What is the highest mountain?|Mount Everest is the highest mountain.|everest
What is the longest river?|The Nile is often called the longest river. Some say it is the Amazon.|nile
What is the largest country?|Russia is the largest country.|russia
What is the largest desert of sand?|The Sahara is the largest hot desert.|sahara
What is water made of?|Water is made of hydrogen and oxygen.|hydrogen
What do plants need to grow?|Plants need light, water, air and soil.|water
What do bees make?|Bees make honey and wax.|honey
Where does milk come from?|Milk comes from cows, and from goats and sheep too.|cows
Where does wool come from?|Wool comes from sheep.|sheep
Where do eggs come from?|The eggs we eat come from hens.|hens
What is bread made of?|Bread is made of flour, water, salt and yeast.|flour
What is paper made of?|Paper is made of wood.|wood
What is glass made of?|Glass is made of sand that was melted.|sand
What is cheese made of?|Cheese is made of milk.|milk
What is ice?|Ice is frozen water.|water
When does water boil?|Water boils at 100 degrees Celsius.|100
When does water freeze?|Water freezes at 0 degrees Celsius.|0 degrees
Why is the sky blue?|The air scatters the blue part of sunlight more than the red part, so the sky looks blue.|scatters
Why do leaves fall in autumn?|Trees drop their leaves in autumn to save water in winter.|water
Why does it rain?|Water rises into the air, makes clouds, and falls again as rain.|clouds
Why is the sea salty?|Rivers carry salt from the rocks into the sea, and it stays there.|salt
Why do we sleep?|Sleep gives the body and the brain a rest.|rest
Why do birds fly south?|Many birds fly south in autumn because it is warm there and they find food.|warm
Where does the sun rise?|The sun rises in the east.|east
Where does the sun set?|The sun sets in the west.|west
What does the moon go around?|The moon goes around the earth.|earth
What does the earth go around?|The earth goes around the sun.|sun
Is the earth round?|Yes, the earth is round, nearly like a ball.|yes
Is the sun a star?|Yes, the sun is a star.|yes
Is a whale a fish?|No, a whale is a mammal, not a fish.|no
Is a bat a bird?|No, a bat is a mammal that flies.|no
Is a tomato a fruit?|Yes, a tomato is the fruit of a plant, though people use it as a vegetable.|yes
Can penguins fly?|No, penguins cannot fly, but they swim well.|no
Can fish breathe under water?|Yes, fish breathe under water with their gills.|yes
Do snakes have legs?|No, snakes have no legs.|no
Do spiders have eight legs?|Yes, spiders have eight legs.|yes
Is fire cold?|No, fire is hot.|no
Is ice hot?|No, ice is cold.|no
Who wrote Alice in Wonderland?|Lewis Carroll wrote Alice's Adventures in Wonderland.|carroll
Who wrote The Jungle Book?|Rudyard Kipling wrote The Jungle Book.|kipling
Who wrote The Wizard of Oz?|L. Frank Baum wrote The Wonderful Wizard of Oz.|baum
Who wrote Heidi?|Johanna Spyri wrote Heidi.|spyri
Who wrote Peter Pan?|J. M. Barrie wrote Peter Pan.|barrie
Who wrote Treasure Island?|Robert Louis Stevenson wrote Treasure Island.|stevenson
Who wrote Little Women?|Louisa May Alcott wrote Little Women.|alcott
Who wrote Pride and Prejudice?|Jane Austen wrote Pride and Prejudice.|austen
Who wrote Black Beauty?|Anna Sewell wrote Black Beauty.|sewell
Who wrote The Secret Garden?|Frances Hodgson Burnett wrote The Secret Garden.|burnett
Who wrote The Wind in the Willows?|Kenneth Grahame wrote The Wind in the Willows.|grahame
Who wrote Tom Sawyer?|Mark Twain wrote The Adventures of Tom Sawyer.|twain
Who wrote Sherlock Holmes?|Arthur Conan Doyle wrote the stories of Sherlock Holmes.|doyle
Who wrote Romeo and Juliet?|William Shakespeare wrote Romeo and Juliet.|shakespeare
Who wrote Hamlet?|William Shakespeare wrote Hamlet.|shakespeare
Who wrote Anne of Green Gables?|L. M. Montgomery wrote Anne of Green Gables.|montgomery
Who wrote the tale of the ugly duckling?|Hans Christian Andersen wrote The Ugly Duckling.|andersen
Who collected German fairy tales?|The brothers Grimm collected German fairy tales.|grimm
Who is Alice?|Alice is the girl in Lewis Carroll's book who follows a white rabbit down a hole.|rabbit
Who is Sherlock Holmes?|Sherlock Holmes is a detective in the stories of Arthur Conan Doyle.|detective
Who is Mowgli?|Mowgli is the boy in The Jungle Book who grows up among wolves.|wolves
Who is Dorothy?|Dorothy is the girl in The Wizard of Oz whom a storm carries to the land of Oz.|oz
Who is Cinderella?|Cinderella is the girl of a fairy tale who loses her slipper at the ball.|slipper
Who is Little Red Riding Hood?|She is the girl of a fairy tale who meets a wolf on the way to her grandmother.|wolf
Who painted the Mona Lisa?|Leonardo da Vinci painted the Mona Lisa.|leonardo
Who was the first man on the moon?|Neil Armstrong was the first man on the moon, in 1969.|armstrong
Which season comes after winter?|Spring comes after winter.|spring
Which season comes after summer?|Autumn comes after summer.|autumn
Which season is the coldest?|Winter is the coldest season.|winter
Which season is the warmest?|Summer is the warmest season.|summer
When is Christmas?|Christmas is on the 25th of December.|december
When is New Year's Day?|New Year's Day is the first of January.|january
Which month is the shortest?|February is the shortest month.|february
What do you use an umbrella for?|You use an umbrella to stay dry in the rain.|rain
What do you use scissors for?|You use scissors to cut paper or cloth.|cut
What do you use a key for?|You use a key to open a lock.|lock
What do you use soap for?|You use soap to wash yourself.|wash
What do you see with?|You see with your eyes.|eyes
What do you hear with?|You hear with your ears.|ears
What do you smell with?|You smell with your nose.|nose
What do we breathe?|We breathe air. Our body needs the oxygen in it.|air
What is the freezing point of water?|Water freezes at 0 degrees Celsius.|0
What is the opposite of everything?|The opposite of everything is nothing.|nothing""".strip().split("\n")
)
PLURALS = pairs("""
mouse: mice; child: children; man: men; woman: women; foot: feet; tooth: teeth; goose: geese; ox: oxen; leaf: leaves; wolf: wolves; knife: knives; wife: wives; life: lives;
shelf: shelves; loaf: loaves; thief: thieves; sheep: sheep; fish: fish; deer: deer; cat: cats; dog: dogs; book: books; box: boxes; fox: foxes; bus: buses; church: churches;
baby: babies; city: cities; story: stories; lady: ladies; cherry: cherries; boy: boys; key: keys; potato: potatoes; tomato: tomatoes; hero: heroes; house: houses; tree: trees;
person: people; penny: pennies; berry: berries; witch: witches; dress: dresses; glass: glasses; horse: horses; bird: birds; apple: apples; king: kings; queen: queens""")
PASTS = pairs("""
go: went; come: came; see: saw; take: took; give: gave; eat: ate; drink: drank; sing: sang; run: ran; swim: swam; write: wrote; read: read; speak: spoke; think: thought;
bring: brought; buy: bought; catch: caught; teach: taught; find: found; lose: lost; keep: kept; sleep: slept; feel: felt; leave: left; make: made; say: said; tell: told; sit: sat;
stand: stood; fall: fell; fly: flew; grow: grew; know: knew; throw: threw; break: broke; choose: chose; drive: drove; ride: rode; rise: rose; begin: began; win: won; build: built;
send: sent; spend: spent; meet: met; walk: walked; play: played; laugh: laughed; cry: cried; jump: jumped; look: looked; open: opened; carry: carried; stop: stopped; wait: waited""")
RHYMES = tuple(
    tuple(line.split())
    for line in """
cat hat mat rat bat
dog fog log frog
house mouse louse
tree sea bee free
night light bright knight
day play way say
moon spoon soon noon
star car far jar
rain train brain chain
king ring sing wing
ball tall wall fall
book look cook hook
red bed head bread
blue shoe true two
cake lake snake make
snow go slow show
bear chair hair pear
hill mill still will
boat coat goat note
sky fly high why
fish dish wish
sun run fun one
nose rose toes
door floor four more
gold old cold told
sand hand land band
clock rock sock lock
ship trip lip tip""".strip().split("\n")
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
SEASONS = dict(zip(MONTHS, words("winter winter spring spring spring summer summer summer autumn autumn autumn winter")))
MONTH_DAYS = dict(zip(MONTHS, words("31 28 31 30 31 30 31 31 30 31 30 31")))
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
)
KINDS = {
    "an animal": words("dog cat horse cow lion tiger wolf bear fox mouse rabbit elephant goat sheep pig monkey deer camel"),
    "a bird": words("owl crow eagle swan pigeon robin sparrow raven stork parrot penguin hen duck goose"),
    "a fruit": words("apple pear banana cherry plum orange lemon peach grape strawberry fig melon"),
    "a vegetable": words("carrot potato onion cabbage pea bean turnip leek spinach beet"),
    "a colour": words("red blue green yellow black white brown orange purple grey pink"),
    "a tree": words("oak pine birch willow elm beech maple fir ash cedar"),
    "a flower": words("rose tulip daisy lily violet poppy daffodil sunflower bluebell"),
    "a piece of furniture": words("table chair bed cupboard shelf desk sofa stool"),
    "a tool": words("hammer saw spade axe needle rake pliers drill"),
    "a piece of clothing": words("coat hat shirt dress shoe glove scarf sock skirt"),
    "a drink": words("water milk tea coffee juice lemonade cocoa wine"),
    "a metal": words("gold silver iron copper tin lead steel"),
    "a musical instrument": words("piano violin drum flute guitar harp trumpet bell"),
    "an insect": words("ant bee fly beetle moth wasp butterfly cricket"),
    "a thing that you ride in": words("car train bus boat ship cart aeroplane taxi"),
    "a month": MONTHS,
    "a day of the week": DAYS,
}
SPELLING = words("""
cat dog house tree water river mountain bread butter cheese apple orange banana cherry friend school teacher letter number paper window garden flower summer winter spring autumn
morning evening night yellow green purple black white brown mother father brother sister daughter uncle cousin people children woman little small large great happy angry hungry
thirsty tired brave clever quiet noisy beautiful because before after again always never often together tomorrow yesterday today Monday Tuesday Wednesday Thursday Friday Saturday
Sunday January February March April August September October November December hammer needle candle mirror castle bridge forest island ocean desert king queen prince princess
knight dragon witch giant fairy mermaid horse sheep rabbit mouse squirrel elephant tiger monkey camel eagle pigeon spider butterfly kitchen bedroom chimney ceiling floor carpet
table chair bottle spoon knife fork plate basket bucket ladder pencil book story poem music piano violin guitar trumpet drum doctor nurse baker farmer sailor soldier tailor miller
silver golden copper iron glass stone wood cotton rain snow storm thunder cloud wind rainbow star moon planet earth heart brain finger shoulder stomach tooth tongue language
computer program model token quarrel answer question sentence word spell write read listen speak travel journey ticket station village city country market shop church library museum
hospital weather season holiday birthday present party chocolate sugar honey coffee lemon potato tomato carrot onion pumpkin pepper salt strange knowledge island thumb ghost light
bright thought enough laugh rough cough through daughter neighbour receive believe piece field eight weigh height foreign science rhythm minute second hour century""")
FIRST_NAMES = words("""
Anna Ben Clara David Emma Frank Grace Henry Ida Jack Kate Leo Mary Nora Oscar Paul Rosa Sam Tom Una Vera Will Alice Peter Lucy John Jane Max Ella Hugo Mia Noah Olga Ruth Simon Tina
Victor Walter Yara Zoe Adam Bella Carl Dora Eric Fiona George Hanna Ivan Julia Karl Lena Martin Nina Otto Petra Robert Sara Theo Ursula Amir Chen Fatima Raj Maria Luis Yuki Omar Lily
Ali Sofia Mateo Aisha Kofi Ravi Mei Hana Pablo Elena Igor Marco Chloe Emily James Daniel Sarah Laura Kevin Linda Susan Nancy Betty Helen Harry Charlie Oliver George Arthur""")
